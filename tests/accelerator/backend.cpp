// standin: an accelerator for torch on a machine that has none. It is slow where devices are fast and strict where they
// are lenient, so that code which works by luck on a device fails here.
//
// Two devices of torch's PrivateUse1 type:
//
// - Memory is mapped twice. Tensors carry addresses of a mapping that nobody may touch (PROT_NONE), so host code that
//   follows a `data_ptr` faults at once, at every moment. Kernels use a second mapping, at a constant distance.
// - Nothing is done when it is called. Copies and kernels are queued on a stream. The stream's thread runs them one
//   after the other, and none while the devices are held.
// - Only events order streams; the default stream is one like the others. A failure of a queued operation is raised by
//   the next wait for its stream, or for an event that was recorded there.
// - Processes can map each other's memory, by handles. All addresses lie where they lie in every process, so what is
//   mapped is never at the address that its owner knows. A batch of copies begins when an event behind it is asked for
//   and not before, and copies its last piece first. A piece that is not within one allocation or one mapping, when the
//   batch runs, is a failure, and counted.
//
// Kernels are torch's own for the CPU. Operators that return new tensors wait for their stream, because the shapes of
// results are not known before. In-place operators and those with `out` do not wait.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::IValue;
constexpr auto kStandIn = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kArenaBytes = size_t{4} << 30;  // of addresses; pages get memory when they are written to
constexpr size_t kMappedBytes = size_t{64} << 30;  // of addresses for memory of other processes
char* const kSeen = reinterpret_cast<char*>(uintptr_t{1} << 45);  // the first address that tensors carry
constexpr size_t kDistance = size_t{1} << 40;  // from an address that tensors carry to where its bytes are

/// Where the bytes of a device's address are.
char* real(const void* seen) { return const_cast<char*>(static_cast<const char*>(seen)) + kDistance; }

/// Map memory, or only reserve addresses for it, at this address and nowhere else.
char* map_at(char* address, size_t bytes, int protection, int file, off_t offset) {
  const int flags = MAP_FIXED_NOREPLACE | MAP_SHARED;
  void* found = mmap(address, bytes, protection, flags, file, offset);
  TORCH_CHECK(found == address, "standin: addresses are taken");
  return address;
}

// --- memory

/// What another process needs to map an allocation: the file of its owner's memory, and where it is in the file.
struct Handle {
  int64_t process, file, offset, bytes;
};

/// The memory of one device: addresses that tensors carry, and the bytes at a distance.
class Arena {
 public:
  explicit Arena(size_t index) : seen_(kSeen + index * kArenaBytes), file_(memfd_create("standin", 0)) {
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, kArenaBytes) == 0, "standin: no memory file");
    map_at(seen_, kArenaBytes, PROT_NONE, file_, 0);
    map_at(real(seen_), kArenaBytes, PROT_READ | PROT_WRITE, file_, 0);
  }

  bool has(const void* address) const { return address >= seen_ && address < seen_ + kArenaBytes; }

  char* take(size_t bytes) {
    std::lock_guard lock(mutex_);
    if (auto found = free_.find(bytes); found != free_.end()) {
      char* address = found->second;
      free_.erase(found);
      used_[address] = bytes;
      return address;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, top_ + bytes <= kArenaBytes, "standin: out of memory (", bytes, " bytes)");
    top_ += bytes;
    used_[seen_ + top_ - bytes] = bytes;
    return seen_ + top_ - bytes;
  }

  void give_back(char* address, size_t bytes) {
    madvise(real(address), bytes, MADV_REMOVE);
    std::lock_guard lock(mutex_);
    used_.erase(address);
    free_.emplace(bytes, address);
  }

  /// The allocation in use that an address is in: where it begins, and its size; 0 if there is none.
  std::pair<char*, size_t> allocation_at(const char* address) {
    std::lock_guard lock(mutex_);
    auto next = used_.upper_bound(const_cast<char*>(address));
    if (next == used_.begin() || address >= std::prev(next)->first + std::prev(next)->second) return {nullptr, 0};
    return *std::prev(next);
  }

  Handle handle_of(const char* address, size_t bytes) const { return {getpid(), file_, address - seen_, (int64_t)bytes}; }

 private:
  char* const seen_;
  const int file_;
  size_t top_ = 0;
  std::map<char*, size_t> used_;
  std::multimap<size_t, char*> free_;
  std::mutex mutex_;
};

Arena& arena(DeviceIndex device) {
  static Arena* const arenas[kDevices] = {new Arena(0), new Arena(1)};
  return *arenas[device];
}

// --- streams and events

std::mutex& mutex = *new std::mutex;  // of all that follows; never destroyed, since the threads never end
std::condition_variable& changed = *new std::condition_variable;  // but for work that a stream may begin
bool held = false;
int64_t waiting = 0;  // threads of the host that wait for a stream, an event or a device
int64_t failing_copies = 0;  // how many of the next copies fail

// Kernels that the device has not, as many accelerators lack some: flags of `standin_refuse`.
constexpr int64_t kComplex = 1, kInt64 = 2, kIndexing = 4, kPinned = 8;
std::atomic<int64_t> refused{0};

template <typename Condition>
void wait_for(std::unique_lock<std::mutex>& lock, Condition condition) {
  ++waiting;
  changed.wait(lock, condition);
  --waiting;
}

/// A queue of work and the thread that does it.
class Queue {
 public:
  explicit Queue(DeviceIndex device) : device(device) { std::thread([this] { run(); }).detach(); }

  /// Add work, as copies and kernels are, or bookkeeping, which has no delay.
  void give(std::function<void()> job, bool is_work = true) {
    std::lock_guard lock(mutex);
    jobs_.emplace_back(std::move(job), is_work);
    ++given_;
    may_run_.notify_one();
  }

  /// Add work that begins once the host has asked for an event behind it, or waits for this stream.
  void give_once_asked(std::function<void()> job) {
    uint64_t position;
    {
      std::lock_guard lock(mutex);
      position = given_ + 1;
    }
    auto wait = [this, position] {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this, position] { return asked_ >= position; });
    };
    give(wait, false);
    give(std::move(job));
  }

  /// Note that the host asks whether all that was given, up to a position, is done; the caller has locked.
  void ask(uint64_t position) {
    asked_ = std::max(asked_, position);
    changed.notify_all();
    may_run_.notify_one();
  }

  /// Look whether work may begin, which was held; the caller has locked.
  void look() { may_run_.notify_one(); }

  /// How much was given so far; the caller has locked.
  uint64_t position() const { return given_; }

  /// How much of it is not done; the caller has locked.
  uint64_t length() const { return given_ - done_; }

  /// Wait for what has been given so far, as a blocking call of torch does: that is done even while devices are held.
  void finish() {
    std::unique_lock lock(mutex);
    forced_ = given_;
    ask(given_);
    changed.wait(lock, [this, until = given_] { return done_ >= until; });
    raise_failure();
  }

  /// Wait for what has been given so far, as who asks for a stream or a device does.
  void wait() {
    std::unique_lock lock(mutex);
    ask(given_);
    wait_for(lock, [this, until = given_] { return done_ >= until; });
    raise_failure();
  }

  /// Raise the failure of an operation that was queued here, once; the caller has locked.
  void raise_failure() const {
    TORCH_CHECK(failure_.empty(), "standin: a queued operation failed: ", std::exchange(failure_, ""));
  }

  const DeviceIndex device;

 private:
  void run() {
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
    while (true) {
      std::unique_lock lock(mutex);
      may_run_.wait(lock, [this] { return !jobs_.empty() && !(held && jobs_.front().second && done_ >= forced_); });
      auto [job, is_work] = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      std::string problem;
      try {
        job();
      } catch (const c10::Error& error) {
        problem = error.what_without_backtrace();
      } catch (const std::exception& error) {
        problem = error.what();
      }
      job = nullptr;  // lets go of its tensors
      lock.lock();
      if (!problem.empty()) failure_ = problem;
      ++done_;
      changed.notify_all();
    }
  }

  // Each stream's own: hundreds of streams lie idle, and would all wake whenever anything happens on one.
  std::condition_variable may_run_;
  std::deque<std::pair<std::function<void()>, bool>> jobs_;
  uint64_t given_ = 0, done_ = 0, forced_ = 0, asked_ = 0;
  mutable std::string failure_;
};

/// The streams of the process: number n is one of device n % kDevices, the lowest are the default ones. All stay.
std::map<c10::StreamId, std::unique_ptr<Queue>>& queues() {
  static auto* all = new std::map<c10::StreamId, std::unique_ptr<Queue>>();
  return *all;
}

Queue& queue_of(c10::StreamId id) {
  std::lock_guard lock(mutex);
  auto& found = queues()[id];
  if (!found) found = std::make_unique<Queue>(id % kDevices);
  return *found;
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {0, 1};

Queue& current_queue(DeviceIndex device) { return queue_of(current_streams[device]); }

struct Event {
  uint64_t recorded = 0, happened = 0;
  Queue* queue = nullptr;  // where it was recorded last
  uint64_t position = 0;  // how much was given to the queue before
  std::chrono::steady_clock::time_point at;
};
using SharedEvent = std::shared_ptr<Event>;

void record(const SharedEvent& event, Queue& queue) {
  std::unique_lock lock(mutex);
  const uint64_t version = ++event->recorded;
  event->queue = &queue;
  event->position = queue.position();
  lock.unlock();
  auto happen = [event, version] {
    std::lock_guard lock(mutex);
    event->happened = std::max(event->happened, version);
    event->at = std::chrono::steady_clock::now();
    changed.notify_all();
  };
  queue.give(happen, false);
}

void make_wait(Queue& queue, const SharedEvent& event) {
  std::unique_lock lock(mutex);
  auto wait = [event, version = event->recorded] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return event->happened >= version; });
  };
  lock.unlock();
  queue.give(wait, false);
}

// --- what torch asks of a device

struct StandInAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    const Device where(kStandIn, current_device);
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, where};
    const size_t page = sysconf(_SC_PAGESIZE), rounded = (bytes + page - 1) / page * page;
    struct Block {
      Arena& arena;
      char* address;
      size_t bytes;
    };
    auto* block = new Block{arena(where.index()), arena(where.index()).take(rounded), rounded};
    auto free = [](void* context) {
      auto* block = static_cast<Block*>(context);
      block->arena.give_back(block->address, block->bytes);
      delete block;
    };
    return {block->address, block, free, where};
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "standin: streams copy memory"); }
} allocator;

/// Host memory that counts as pinned.
struct PinnedAllocator final : at::Allocator {
  std::map<const char*, size_t> blocks;
  at::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!(refused & kPinned), "standin: no memory can be pinned");
    char* address = static_cast<char*>(aligned_alloc(4096, (bytes + 4096) / 4096 * 4096));
    std::lock_guard lock(mutex);
    blocks[address] = bytes;
    return {address, address, &free_block, at::kCPU};
  }
  static void free_block(void* address);
  bool has(const void* data) {
    std::lock_guard lock(mutex);
    auto next = blocks.upper_bound(static_cast<const char*>(data));
    return next != blocks.begin() && data < std::prev(next)->first + std::prev(next)->second;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned;

void PinnedAllocator::free_block(void* address) {
  std::lock_guard lock(mutex);
  pinned.blocks.erase(static_cast<char*>(address));
  free(address);
}

struct StandInGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStandIn; }
  Device exchangeDevice(Device device) const override {
    return Device(kStandIn, std::exchange(current_device, device.index()));
  }
  Device getDevice() const override { return Device(kStandIn, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "standin: there is no device ", device);
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream stream(c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(kStandIn, queue_of(id).device), id);
  }
  DeviceIndex index(Device device) const { return device.has_index() ? device.index() : current_device; }
  c10::Stream getStream(Device device) const override { return stream(current_streams[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(index(device)); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return stream(next++ * kDevices + index(device));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(std::exchange(current_streams[to.device_index()], to.id()));
  }
  bool queryStream(const c10::Stream& one) const override {
    Queue& queue = queue_of(one.id());
    std::lock_guard lock(mutex);
    return queue.length() == 0;
  }
  void synchronizeStream(const c10::Stream& one) const override { queue_of(one.id()).wait(); }
  void synchronizeDevice(DeviceIndex device) const override {
    std::unique_lock lock(mutex);
    std::vector<Queue*> all;
    for (auto& [id, queue] : queues())
      if (queue->device == (device < 0 ? current_device : device)) all.push_back(queue.get());
    lock.unlock();
    for (Queue* queue : all) queue->wait();
  }

  // torch keeps a pointer of ours in its own event, null until it is first recorded.
  static SharedEvent& event_at(void* event) { return *static_cast<SharedEvent*>(event); }
  void record(void** event, const c10::Stream& on, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new SharedEvent(std::make_shared<Event>());
    ::record(event_at(*event), queue_of(on.id()));
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event != nullptr) make_wait(queue_of(waiting.id()), event_at(event));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    std::unique_lock lock(mutex);
    event_at(event)->queue->ask(event_at(event)->position);
    if (event_at(event)->happened < event_at(event)->recorded) return false;
    event_at(event)->queue->raise_failure();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    std::unique_lock lock(mutex);
    event_at(event)->queue->ask(event_at(event)->position);
    wait_for(lock, [one = event_at(event), until = event_at(event)->recorded] { return one->happened >= until; });
    event_at(event)->queue->raise_failure();
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_at(second)->at - event_at(first)->at).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<SharedEvent*>(event); }
};

struct StandInHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { StandInGuard().setDevice(Device(kStandIn, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }
  bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  Device getDeviceFromPtr(void* data) const override {
    for (DeviceIndex index = 0; index < kDevices; ++index)
      if (arena(index).has(data)) return Device(kStandIn, index);
    TORCH_CHECK(false, "standin: that is no memory of a device");
  }
} hooks;

// --- operators

/// The tensor for kernels of the CPU: the same bytes, by the mapping that may be touched. Copies take any type.
Tensor reachable(const Tensor& tensor, bool is_kernel = true) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  const int64_t kind = tensor.is_complex() ? kComplex : tensor.scalar_type() == at::kLong ? kInt64 : 0;
  TORCH_CHECK_NOT_IMPLEMENTED(!is_kernel || !(refused & kind), "standin: no kernels for ", tensor.scalar_type());
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options);
  void* bytes = real(tensor.mutable_data_ptr());
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
}

IValue reachable(const IValue& value) {
  if (value.isTensor()) return reachable(value.toTensor());
  if (value.isDevice()) return Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& tensor : value.toTensorVector()) found.push_back(reachable(tensor));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (const auto& tensor : value.toOptionalTensorVector())
      found.push_back(tensor ? std::optional(reachable(*tensor)) : std::nullopt);
    return found;
  }
  return value;
}

/// The device of an operator: its device argument, or that of the first tensor that is on one.
Device device_among(c10::ArrayRef<IValue> values) {
  for (const IValue& value : values) {
    if (value.isDevice()) return value.toDevice();
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone())
      return value.toTensor().device();
    if (value.isTensorList() && !value.toTensorVector().empty()) return value.toTensorVector().front().device();
  }
  return Device(kStandIn, current_device);
}

/// The argument that a result is, for operators in place and those with `out`; -1 if the result is new.
int written_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  for (size_t at = 0; at < schema.arguments().size(); ++at) {
    const auto* argument = schema.arguments()[at].alias_info();
    if (argument && argument->isWrite() && result.alias_info() && *argument == *result.alias_info()) return at;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!result.alias_info(), "standin: ", schema.name(), " returns a view");
  return -1;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool to_device = target.is_privateuseone(), from_device = source.is_privateuseone();
  Queue& queue = current_queue((from_device ? source : target).get_device());
  Queue& other = current_queue((to_device ? target : source).get_device());
  const auto before = std::make_shared<Event>(), after = std::make_shared<Event>();
  if (&queue != &other) record(before, other), make_wait(queue, before);
  auto copy = [source, target, from = reachable(source, false), to = reachable(target, false)] {
    {
      std::lock_guard lock(mutex);
      TORCH_CHECK(failing_copies == 0 || failing_copies-- <= 0, "standin: a copy is to fail");
    }
    to.copy_(from);
  };
  queue.give(std::move(copy));
  if (&queue != &other) record(after, queue), make_wait(other, after);
  if (!non_blocking && !(to_device && from_device)) queue.finish();
  return target;
}

/// Any operator that has no kernel below: queues the CPU's.
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<IValue> given(stack->end() - count, stack->end());
  const bool is_indexing = schema.name().find("index") != std::string::npos;
  TORCH_CHECK_NOT_IMPLEMENTED(!is_indexing || !(refused & kIndexing), "standin: no kernel for ", schema.name());
  const Device device = device_among(given);
  const c10::DeviceGuard guard(device);
  std::vector<IValue> arguments;
  for (const IValue& value : given) arguments.push_back(reachable(value));
  auto results = std::make_shared<torch::jit::Stack>();
  Queue& queue = current_queue(current_device);
  queue.give([op, given, arguments, results] {
    *results = arguments;
    op.callBoxed(results.get());
  });
  stack->resize(stack->size() - count);
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    const int written = written_argument(schema, schema.returns()[at]);
    const bool grows = written >= 0 && given[written].isTensor() && given[written].toTensor().numel() == 0;
    if (written < 0 || grows) queue.finish();
    if (grows) {
      const Tensor& target = given[written].toTensor();
      copy_from((*results)[at].toTensor(), target.resize_((*results)[at].toTensor().sizes()), false);
    }
    if (written >= 0) {
      stack->push_back(given[written]);
    } else {
      const IValue& result = (*results)[at];
      stack->push_back(result.isTensor() ? IValue(result.toTensor().to(Device(kStandIn, current_device))) : result);
    }
  }
}

using Ints = c10::IntArrayRef;
using MaybeType = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<Device>;
using MaybeFormat = std::optional<at::MemoryFormat>;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(Ints size, MaybeType type, MaybeLayout, MaybeDevice device, std::optional<bool>, MaybeFormat format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(Ints size, Ints stride, MaybeType type, MaybeLayout, MaybeDevice device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(type));
}

const Tensor& resize(const Tensor& self, Ints size, MaybeFormat) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > storage->nbytes()) {
    TORCH_CHECK_NOT_IMPLEMENTED(storage->nbytes() == 0, "standin: memory in use does not grow");
    const c10::DeviceGuard guard(self.device());
    storage->set_data_ptr(allocator.allocate(bytes));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, Ints size, Ints stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}
Tensor& set_all(Tensor& self, at::Storage storage) { return at::native::set_(self, std::move(storage)); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_all);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

C10_REGISTER_GUARD_IMPL(PrivateUse1, StandInGuard);
REGISTER_ALLOCATOR(kStandIn, &allocator);
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace

// --- for tests, by ctypes

/// Have no kernels for some types or operators: flags `kComplex` and those beside it.
extern "C" void standin_refuse(int64_t flags) { refused = flags; }

/// Have the next copies fail, so many.
extern "C" void standin_fail_copies(int64_t count) {
  std::lock_guard lock(mutex);
  failing_copies = count;
}

/// Hold all copies and kernels that have not begun, on all streams, or let them go on. Blocking calls go on.
extern "C" void standin_hold(bool hold) {
  std::lock_guard lock(mutex);
  held = hold;
  for (auto& [id, queue] : queues()) queue->look();
}

/// How many threads of the host wait for a stream, an event or a device.
extern "C" int64_t standin_waiting() {
  std::lock_guard lock(mutex);
  return waiting;
}

/// How many copies, kernels and events are queued on all streams.
extern "C" int64_t standin_queued() {
  std::lock_guard lock(mutex);
  int64_t found = 0;
  for (auto& [id, queue] : queues()) found += queue->length();
  return found;
}

/// The address by which the host reaches a device's memory, as a network card does by RDMA; others as they are.
extern "C" const void* standin_reach(const void* address) {
  for (DeviceIndex index = 0; index < kDevices; ++index)
    if (arena(index).has(address)) return real(address);
  return address;
}

/// Memory of other processes that is mapped, by its first address.
class Mapped {
 public:
  char* open(const Handle& handle) {
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    std::lock_guard lock(mutex_);
    char* address = kSeen + kDevices * kArenaBytes + top_;  // an address is never used again
    top_ += handle.bytes;
    if (top_ <= kMappedBytes) map_at(real(address), handle.bytes, PROT_READ | PROT_WRITE, file, handle.offset);
    ::close(file);
    if (top_ > kMappedBytes) return nullptr;
    all_[address] = handle.bytes;
    return address;
  }

  bool close(char* address) {
    std::lock_guard lock(mutex_);
    auto found = all_.find(address);
    if (found == all_.end()) return false;
    munmap(real(address), found->second);
    all_.erase(found);
    return true;
  }

  std::pair<char*, size_t> at(const char* address) {
    std::lock_guard lock(mutex_);
    auto next = all_.upper_bound(const_cast<char*>(address));
    if (next == all_.begin() || address >= std::prev(next)->first + std::prev(next)->second) return {nullptr, 0};
    return *std::prev(next);
  }

  int64_t count() {
    std::lock_guard lock(mutex_);
    return all_.size();
  }

 private:
  size_t top_ = 0;
  std::map<char*, size_t> all_;
  std::mutex mutex_;
};

Mapped& mapped = *new Mapped;
std::atomic<int64_t> wrong_pieces{0};

/// The allocation or the mapping that an address is in, and its size; 0 if there is none.
std::pair<char*, size_t> memory_at(const char* address) {
  for (DeviceIndex index = 0; index < kDevices; ++index)
    if (arena(index).has(address)) return arena(index).allocation_at(address);
  return mapped.at(address);
}

bool is_memory(const char* address, size_t bytes) {
  const auto [begin, size] = memory_at(address);
  return size && address + bytes <= begin + size;
}

/// Where the allocation that an address is in begins, and its size; 0 if it is none of this process.
extern "C" void standin_allocation_at(const char* address, char** begin, int64_t* bytes) {
  std::tie(*begin, *bytes) = memory_at(address);
}

/// A handle of the allocation that begins at an address.
extern "C" bool standin_export(const char* address, Handle* handle) {
  for (DeviceIndex index = 0; index < kDevices; ++index) {
    if (!arena(index).has(address)) continue;
    const auto [begin, bytes] = arena(index).allocation_at(address);
    if (begin != address) return false;
    *handle = arena(index).handle_of(begin, bytes);
    return true;
  }
  return false;
}

/// Map the allocation of a handle, of this or of another process; null if its process has ended.
extern "C" char* standin_open(const Handle* handle) { return mapped.open(*handle); }

/// Unmap what was opened at an address; false if nothing was.
extern "C" bool standin_close(char* address) { return mapped.close(address); }

/// How many allocations of other processes are mapped.
extern "C" int64_t standin_mapped() { return mapped.count(); }

/// How many pieces of batches were not memory of this process when they were to be copied.
extern "C" int64_t standin_wrong_pieces() { return wrong_pieces; }

/// Queue copies on a stream. They begin once an event behind them is asked for, the last of them first.
extern "C" void standin_copy_batch(
    const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes, int64_t count, int64_t stream) {
  struct Piece {
    char *target, *source;
    size_t bytes;
  };
  std::vector<Piece> pieces;
  for (int64_t at = 0; at < count; ++at)
    pieces.push_back({reinterpret_cast<char*>(targets[at]), reinterpret_cast<char*>(sources[at]), sizes[at]});
  Queue& queue = queue_of(stream);
  queue.give_once_asked([pieces = std::move(pieces)] {
    {
      std::lock_guard lock(mutex);
      TORCH_CHECK(failing_copies == 0 || failing_copies-- <= 0, "standin: a copy is to fail");
    }
    for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
      if (!is_memory(piece->target, piece->bytes) || !is_memory(piece->source, piece->bytes)) {
        ++wrong_pieces;
        TORCH_CHECK(false, "standin: an illegal address");
      }
      memcpy(real(piece->target), real(piece->source), piece->bytes);
    }
  });
}
