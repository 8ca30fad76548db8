"""Block copies on any kind of device for which torch has streams and events.

Copies run on their own stream, which does not wait for the engine's streams, so that a busy engine does not delay them.
Before a copy the caller must therefore make sure that the source is computed (`ServeRequest.ready`), and that nothing
still writes to the target (`LoadRequest.after`).

Devices differ in their kernels: many have none for complex numbers, some none for 64-bit integers. So blocks are copied
in the cache's own dtype or, if a trial shows that the device cannot do that, as bytes. If neither works, each block is
copied by one call, which every device can do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvflow.core.cache.regions import Device
from kvflow.transport.device.cache_device import CacheDevice

_INDEX_TYPES = (torch.int64, torch.int32)


class AcceleratorDevice(CacheDevice):
    """A `CacheDevice` with a stream for copies. Created on the copy thread."""

    def __init__(self, where: Device) -> None:
        """Make the device current on this thread, create a stream, and record an event on the stream as a trial.

        Raises torch's own error if torch has no streams or events for this kind of device.
        """
        super().__init__(where)
        self._stream, self._done = self._open()
        with self.copying():
            pass  # some kinds refuse an event only when it is recorded
        self._indexed: dict[torch.dtype, bool] = {}
        self._index_type: torch.dtype | None = None
        if not self.as_bytes:
            self._index_type = next((kind for kind in _INDEX_TYPES if self._can_index(torch.uint8, kind)), None)

    def _open(self) -> tuple[torch.Stream, torch.Event]:
        """Make the device current on this thread. Return a new stream and event for copies."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != self.where.kind:
            raise RuntimeError(f"torch's accelerator is {accelerator}")
        torch.accelerator.set_device_index(self.where.number)
        return torch.Stream(self.name), torch.Event(self.name)

    def _stream_context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which the copy stream is the current stream of this thread."""
        return self._stream

    @property
    def allocates_at_registration(self) -> bool:
        return True

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with self._stream_context():
            try:
                yield
            finally:
                self._done.record(self._stream)
                self._done.synchronize()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        memory = super().allocate(size_bytes)
        torch.accelerator.synchronize(self.name)  # torch may reuse memory that queued work of the engine still uses
        return memory

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).zero_()
        except RuntimeError:  # some devices cannot pin memory
            return super().host_memory(size_bytes)

    def upload(self, ids: npt.NDArray[np.int64]) -> torch.Tensor | None:
        if self._index_type is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self._index_type).to(self.name)

    def view_elements(self, *views: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `views` reinterpreted in the dtype of the engine's tensors, or as bytes.

        The result is bytes if all `views` are bytes, or if the device has no gather and scatter kernels for that dtype.
        """
        elements = super().view_elements(*views)
        dtype = elements[0].dtype
        if dtype not in self._indexed:
            self._indexed[dtype] = self._index_type is not None and self._can_index(dtype, self._index_type)
        return elements if self._indexed[dtype] else tuple(view.view(torch.uint8) for view in elements)

    def _can_index(self, dtype: torch.dtype, index_type: torch.dtype) -> bool:
        """Try whether the device can gather and scatter rows of `dtype` by indices of type `index_type`."""
        try:
            with self.copying():
                rows = torch.zeros(32, dtype=torch.uint8).view(dtype).view(2, -1).to(self.name)
                ids = torch.tensor([1, 0], dtype=index_type).to(self.name)
                gathered = torch.empty_like(rows)
                torch.index_select(rows, 0, ids, out=gathered)
                rows[ids] = gathered
        except (RuntimeError, TypeError, IndexError):
            return False
        return True
