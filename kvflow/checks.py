"""Checks of values from callers, configurations and tickets, before kvflow uses them.

Each check returns its argument as an object of a built-in type, such as int or str. If the value is invalid, the check
raises the given error class, with the name of the field and the shortened value. A bool is not a number, and a float is
not a whole number. Numbers of other packages, such as numpy's, are accepted. Whole numbers have 64 bits, as in
messages; seconds have an upper bound, as timers do.

A value may run its own code when a check inspects it. If that code raises, the value is invalid.
"""

from __future__ import annotations

import difflib
import numbers
import operator
import re
import reprlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import fields, replace
from functools import lru_cache, partial, wraps
from itertools import islice
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
from msgspec import Meta, StructMeta, ValidationError, convert, defstruct
from msgspec.msgpack import Decoder

from kvflow.errors import ConfigError, InvalidInput, RequestError, without_secrets

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    DataT = TypeVar("DataT", bound=DataclassInstance)

ErrorKind: TypeAlias = type[InvalidInput]
Check: TypeAlias = Callable[[object, str], object]
"""Function that checks a field, given (value, name of the field), and returns the value as an object of a built-in
type. The function raises an error if the value is invalid.
"""
ValueT = TypeVar("ValueT")
ClassT = TypeVar("ClassT", bound=type)

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
SECONDS_MAX = 1e9
LOCAL_REQUEST_ID_CHARS_MAX = 512
"""Maximum number of characters of a request id from a local caller. Peers may send longer ids
(`limits.REQUEST_ID_CHARS_MAX`)."""
_REPR_CHARS_MAX = 80
_ERROR_TEXT_CHARS_MAX = 400
_KNOWN_NAMES_MAX = 12  # known names in an error about an unknown name that is close to none
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # step of a path in msgspec's messages, such as `$.ranks[0].port`


class _ShortRepr(reprlib.Repr):
    def repr_str(self, value: str, level: int) -> str:
        return super().repr_str(without_secrets(value), level)  # before a cut could separate a secret from its mark


_SHORT = _ShortRepr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _REPR_CHARS_MAX
_SHORT.maxlevel = 3


def try_call(call: Callable[[], ValueT]) -> ValueT | None:
    """Return the result of `call()`, which runs code of a caller's object; None if it raises an Exception."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - the object's own code may raise anything
        return None


def short_repr(value: object) -> str:
    """Return a short text that shows `value` in a message, even if the `repr` of the value is huge or raises.

    The text has no secrets (`errors.without_secrets`).
    """
    text = try_call(lambda: _SHORT.repr(value))
    if text is None:
        return f"a {type(value).__name__[:_REPR_CHARS_MAX]}"
    line = without_secrets(text.replace("\n", " "))
    return line if len(line) <= _REPR_CHARS_MAX else line[: _REPR_CHARS_MAX - 3] + "..."


def hides_secrets(kind: ClassT) -> ClassT:
    """Decorate class `kind`: its `repr` shows no secrets (`errors.without_secrets`)."""
    whole: Any = kind.__repr__
    setattr(kind, "__repr__", lambda self: without_secrets(whole(self)))  # noqa: B010 - no assignment, for mypy
    return kind


def printable(text: str, chars_max: int) -> str:
    """Return text from outside as one printable line of at most about `chars_max` characters, for messages and logs.

    The line has no secrets (`errors.without_secrets`).
    """
    cut = without_secrets(text)[: chars_max + 1]
    plain = cut if cut.isprintable() else ascii(cut)[1:-1]
    return plain if len(plain) <= chars_max else f"{plain[:chars_max]}..."


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `count` with its noun, such as "1 block" or "3 blocks". `plural`: needed if it is not `noun` with an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def first_few(values: Collection[object], most: int) -> str:
    """Return the first `most` values, each shortened, as a text; "..." stands for further values."""
    first = (str(value)[:_REPR_CHARS_MAX] for value in islice(values, most))
    return ", ".join(first) + (", ..." if len(values) > most else "")


def error_text(error: BaseException) -> str:
    """Return the text of an exception that a caller's code raised, made printable and short for messages and logs."""
    text = try_call(lambda: str(error))
    return "no reason is given" if text is None else printable(text, _ERROR_TEXT_CHARS_MAX)


def checked(value: object, what: str, kind: Any, error: ErrorKind = RequestError) -> Any:
    """Return `value` as an object of a built-in type, after checking that it is of type `kind`.

    `kind`: any type that msgspec converts to, with or without bounds (`msgspec.Meta`). `what`: name of the value in the
    error.

    Raises:
        InvalidInput: of class `error`, if the value has another type or is out of bounds.
    """
    plain = value if type(value) in _PLAIN_TYPES else _plain(value)
    try:
        texts = (plain,) if isinstance(plain, str) else plain if isinstance(plain, tuple | list) else ()
        if texts and not all(is_utf8(item) for item in texts if type(item) is str):
            raise ValidationError("Expected a text that UTF-8 can carry")
        return convert({"value": plain}, kind if type(kind) is StructMeta else _struct_with(kind)).value
    except InvalidInput:  # raised for a nested field
        raise
    except Exception as refused:
        size = f"{len(plain)}: " if isinstance(plain, str) and "length" in str(refused) else ""
        array = try_call(lambda: callable(value.item))  # type: ignore[attr-defined]
        hint = f"; {what}.item() is a number" if array and type(plain) is object else ""
        raise error(f"{what}: {_expected(refused)}, got {size}{short_repr(value)}{hint}") from refused


@lru_cache
def _struct_with(kind: Any) -> Any:
    """Return a msgspec struct type with one field of type `kind`. msgspec caches its analysis of struct types only."""
    return built(defstruct("Held", [("value", kind)]))


def built(kind: type[ValueT]) -> type[ValueT]:
    """Decorate a struct to which values are converted: let msgspec analyse `kind` now, before another thread uses it.

    msgspec analyses a struct at its first use. A process ended in msgspec (0.22.0) while engines on several threads
    converted their first tickets; so kvflow has every struct analysed, by this or by a decoder, when it is imported.
    """
    Decoder(kind)
    return kind


_PLAIN_TYPES = {int, float, bool, str, bytes, tuple, list, dict, NoneType}
_PLAIN_TYPE_OF: tuple[tuple[Any, Any], ...] = ((numbers.Integral, int), (numbers.Real, float), (str, str.__str__))


def _plain(value: Any) -> object:
    """Return a number or text of any class as int, float or str; for others, `object()`, which no check accepts."""
    own = next((own for kind, own in _PLAIN_TYPE_OF if isinstance(value, kind)), None)
    plain = None if own is None else try_call(partial(own, value))
    return object() if plain is None else plain


def _expected(refused: Exception) -> str:
    """Return the words of `refused`, an error of msgspec, that say what was expected but not what was found."""
    words, _, place = str(refused).partition(" - at `$.value")
    words = words.partition(", got ")[0]
    return f"{words[:1].lower()}{words[1:]}{f' at {place[:-1]}' if place[:-1] else ''}"


def whole(
    value: object, what: str, *, least: int = INT64_MIN, most: int = INT64_MAX, error: ErrorKind = RequestError
) -> int:
    """Return `value` as an int. Raise `error` unless it is a whole number from `least` to `most`."""
    if type(value) is int and least <= value <= most:  # the usual case, in few steps: engines advance leases often
        return value
    return int(checked(value, what, _of(int, ge=least, le=most), error))


@lru_cache
def _of(kind: Any, **bounds: Any) -> Any:
    return Annotated[kind, Meta(**bounds)]


_EXACT_MAX = 1 << 53  # above it doubles cannot represent every whole number
_DEPTH_MAX = 8


def without_doubles(value: Any, depth: int = _DEPTH_MAX) -> Any:
    """Return a copy of JSON data with an int in place of each float that is a whole number.

    Gateways that keep JSON in protobuf turn all numbers into doubles. Values nested deeper than `depth` stay unchanged.
    """
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) <= _EXACT_MAX else value
    if depth and isinstance(value, Mapping):
        return {name: without_doubles(item, depth - 1) for name, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [without_doubles(item, depth - 1) for item in value]
    return value


def seconds(value: object, what: str, *, error: ErrorKind = RequestError) -> float:
    """Return `value` as float. Raise `error` unless it is a number above 0 and up to SECONDS_MAX, the longest timer."""
    return float(checked(value, what, Seconds, error))


def deadline(value: object, what: str) -> float:
    """Return `value` as float, at least -SECONDS_MAX. RequestError unless it is a number of at most SECONDS_MAX.

    0 or less is the time of a request that is over, which is no fault of the request.
    """
    return max(float(checked(value, what, _of(float, le=SECONDS_MAX))), -SECONDS_MAX)


def text(value: object, what: str, *, most: int = INT64_MAX, error: ErrorKind = RequestError) -> str:
    """Return `value` as str. Raise `error` unless it is text of at most `most` characters that UTF-8 can encode."""
    return str(checked(value, what, _of(str, max_length=most), error))


def request_id(value: object, most: int = LOCAL_REQUEST_ID_CHARS_MAX) -> str:
    """Return `value` as str. Raise RequestError unless it is a request id: text of 1 to `most` characters."""
    return str(checked(value, "request_id", _of(str, min_length=1, max_length=most)))


def is_utf8(value: str) -> bool:
    """Return True if UTF-8 can encode the text. It cannot encode half of a surrogate pair, which JSON may contain."""
    return value.isascii() or try_call(value.encode) is not None


def is_name(value: object, chars_max: int) -> bool:
    """Return True if `value` can be a name in messages: printable, without spaces, of 1 to `chars_max` characters."""
    return isinstance(value, str) and 0 < len(value) <= chars_max and _is_printable(value)


def name(value: object, what: str, *, most: int, error: ErrorKind = RequestError) -> str:
    """Return `value` as str. Raise `error` unless it is a name (`is_name`) of at most `most` characters."""
    plain = text(value, what, error=error)
    if not is_name(plain, most):
        expected = f"a name without spaces, of at most {counted(most, 'printable character')}"
        raise error(f"{what}: expected {expected}, got {len(plain)}: {short_repr(plain)}")
    return plain


@lru_cache(maxsize=1024)  # callers check the length first, since texts stay in the cache
def _is_printable(value: str) -> bool:
    return value.isprintable() and " " not in value


def instance(value: object, kind: type[ValueT], what: str, *, error: ErrorKind = RequestError) -> ValueT:
    """Return `value` unchanged. Raise `error` unless it is an instance of `kind`."""
    if not isinstance(value, kind):
        raise error(f"{what}: expected a {kind.__name__}, got {short_repr(value)}")
    return value


def mapping(value: object, what: str, *, error: ErrorKind = RequestError) -> Mapping[str, object]:
    """Return a copy of `value` as a dict. Raise `error` unless it is a mapping with only str keys."""
    items = try_call(lambda: dict(value)) if isinstance(value, Mapping) else None
    if items is None or not all(isinstance(key, str) for key in items):
        raise error(f"{what}: expected a dict with texts as keys, got {short_repr(value)}")
    return items


def count(values: object, what: str, *, most: int = INT64_MAX, error: ErrorKind = RequestError) -> int:
    """Return the length of `values`.

    Raise `error` if `values` has no length, is a str, bytes or mapping, or has more than `most` items.
    """
    plain = type(values) is list or type(values) is tuple
    length = len(values) if plain else try_call(lambda: len(values))  # type: ignore[arg-type]
    if length is None or (not plain and isinstance(values, str | bytes | Mapping)):
        raise error(f"{what}: expected a list, got {short_repr(values)}")
    if length > most:
        raise error(f"{what}: expected at most {counted(most, 'entry', 'entries')}, got {length}")
    return length


def count_block_ids(block_ids: object, most: int, what: str = "block_ids") -> int:
    """Return the number of block ids in `block_ids`, the block ids of a request, over all groups.

    RequestError if they cannot be counted, or are more than `most`.
    """
    if isinstance(block_ids, Mapping):
        tables = list(mapping(block_ids, what).values())
    else:
        listed = block_ids if isinstance(block_ids, tuple | list) else ()
        tables = list(listed) if listed and isinstance(listed[0], tuple | list | np.ndarray) else [block_ids]
    total = sum(count(ids, what) for ids in tables)
    if total > most:
        expected = f"at most {counted(most, 'entry', 'entries')} (limits.block_ids_max)"
        raise RequestError(f"{what}: expected {expected}, got {total}")
    return total


def whole_numbers(values: object, what: str, *, error: ErrorKind = RequestError) -> npt.NDArray[np.int64]:
    """Return `values` as a new int64 array. Raise `error` unless it is a flat list or array of 64-bit whole numbers.

    An array in `values` may be of any package, such as torch, if numpy can convert the array.
    """
    array = try_call(lambda: _array_of(values))
    if array is not None and array.ndim == 1 and not isinstance(values, bytearray):
        if not len(array):
            return np.empty(0, dtype=np.int64)
        kinds = try_call(lambda: set(map(type, values))) if isinstance(values, list | tuple) else set()
        fits = array.dtype.kind == "i" or (array.dtype.kind == "u" and array.max() <= INT64_MAX)
        if fits and kinds is not None and not kinds & {bool, np.bool_}:
            return array.astype(np.int64)
    raise error(f"{what}: expected a flat list of whole numbers of 64 bits, got {short_repr(values)}")


def _array_of(values: object) -> npt.NDArray[Any]:
    if type(values) is range:  # numpy would iterate over it
        return np.arange(values.start, values.stop, values.step)
    return np.asarray(values)


def one_of(
    value: object,
    what: str,
    *,
    known: Iterable[str],
    error: ErrorKind = RequestError,
    meant: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return `value` as str. Raise `error` unless it is one of the words in `known`.

    `meant`: for some other words, the known word that the error's message suggests.
    """
    plain, words = text(value, what, error=error), tuple(map(str, known))
    if plain not in words:
        *most, last = map(repr, words)
        hint = did_you_mean(meant.get(plain, plain), words)
        raise error(f"{what}: expected {', '.join(most)} or {last}, got {short_repr(value)}{hint}")
    return plain


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?", to end a message, with the word in `known` most similar to `word`.

    Return "" if no word is similar.
    """
    close = difflib.get_close_matches(word[:_REPR_CHARS_MAX], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_known(names: Iterable[str], known: Iterable[str], *, where: str, hint: str = "") -> None:
    """Raise ConfigError, which suggests a similar name, if `names` has names that are not in `known`.

    `where` begins the message; `hint` follows the unknown names.
    """
    known_names = sorted(known)
    if unknown := sorted({*names} - {*known_names}):
        short = [
            name if name.isidentifier() and len(name) <= _REPR_CHARS_MAX else short_repr(name) for name in unknown[:9]
        ]
        listed = first_few(short, 8)
        meant = did_you_mean(unknown[0], known_names) or f"; known are {first_few(known_names, _KNOWN_NAMES_MAX)}"
        raise ConfigError(f"{where}: unknown: {listed}{hint}{meant}")


def refused_value_text(error: Exception, decoded: object) -> str:
    """Return the message of a msgspec error, followed by the value that msgspec has refused.

    `decoded`: the object that was decoded or converted, which contains the value. A lease id, which is secret, is
    left out.
    """
    steps = _STEP.findall(str(error).rpartition("`$")[2])
    if any("lease_id" in name for name, _ in steps):
        return str(error)
    refused: Any = decoded
    for name, index in steps:
        refused = try_call(partial(operator.getitem, refused, name or int(index)))
    return f"{error}, got {short_repr(refused)}"


# --- dataclasses: the annotation of a field defines its check

Count: TypeAlias = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Int64: TypeAlias = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
Deadline: TypeAlias = Annotated[float, deadline]
Timeout: TypeAlias = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


def normalize_fields(record: object, error: ErrorKind, where: str = "") -> None:
    """Check each field of `record`, a frozen dataclass, and set the field to the checked value of a built-in type.

    `where` begins the name of each field in an error.
    """
    for name, _, check in _fields_of(type(record), error):  # type: ignore[arg-type]
        object.__setattr__(record, name, check(getattr(record, name), f"{where}{name}"))


def normalize_request(request: object, kind: type[DataT], verb: str, block_ids_max: int) -> DataT:
    """Check all fields of `request`, a dataclass of type `kind`. Return it with values of built-in types.

    RequestError names the request and the invalid field, or says that there are more than `block_ids_max` block ids. If
    `request` has another type than `kind`, the error names `verb`, the called method.
    """
    known: Any = request if type(request) is kind else instance(request, kind, verb)
    name, ids, changes = known.request_id, known.block_ids, dict[str, Any]()
    if type(name) is not str or not name.isascii() or not 0 < len(name) <= LOCAL_REQUEST_ID_CHARS_MAX:
        changes["request_id"] = name = request_id(name)
    try:
        is_flat = type(ids) in (list, tuple) and (not ids or type(ids[0]) is int)
        if not is_flat or len(ids) > block_ids_max:
            count_block_ids(ids, block_ids_max)
        for field, default, check in _fields_of(kind, RequestError):
            value = getattr(known, field)
            if value is not default and field != "request_id":  # a default needs no check
                plain = check(value, field)
                if plain is not value:
                    changes[field] = plain
    except RequestError as error:
        raise RequestError(f"request {name!r}: {error}") from error
    normalized: DataT = replace(known, **changes) if changes else known
    return normalized


@lru_cache(maxsize=64)
def _fields_of(kind: Hashable, error: Hashable) -> tuple[tuple[str, object, Check], ...]:
    """Return (name, default, check) of each field of dataclass `kind` with a type that can be checked.

    `error`: error class that the checks raise.
    """
    hints = get_type_hints(kind.__init__, include_extras=True)  # type: ignore[misc]
    checks_by_field = ((entry, _check_of(hints[entry.name], error)) for entry in fields(kind))  # type: ignore[arg-type]
    return tuple((entry.name, entry.default, check) for entry, check in checks_by_field if check is not None)


def _check_of(hint: Any, error: Any) -> Check | None:
    """Return the check for a field with the type annotation `hint`; None if the type cannot be checked.

    The check is the function in an `Annotated[...]`, if there is one; else it checks the value's type, and raises
    `error`.
    """
    inner, *others = [arg for arg in get_args(hint) if arg is not NoneType] if NoneType in get_args(hint) else [hint]
    kind, *marks = get_args(inner) if get_origin(inner) is Annotated else (inner,)
    check: Any = marks[0] if marks and callable(marks[0]) else None
    if check is None and not others and (kind in (int, float, str, bool) or get_origin(kind) is tuple):
        return partial(checked, kind=_struct_with(Int64 if hint is int else hint), error=error)
    if check is None and not others and isinstance(kind, type):
        check = lambda value, name: instance(value, kind, name, error=error)  # noqa: E731
    return (
        check if check is None or inner is hint else lambda value, name: None if value is None else check(value, name)
    )


def refuse_unknown_arguments(kind: type[ValueT], **nested: Any) -> type[ValueT]:
    """Decorate dataclass `kind`: its constructor then raises ConfigError for an unknown argument.

    The error's message suggests the known argument with the most similar name. `nested`: for some fields of `kind`, the
    dataclass of the field's values, so that the message can say where an argument of that class belongs.
    """
    made, known = kind.__init__, [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    inner = {entry.name: (name, of) for name, of in nested.items() for entry in fields(of)}

    @wraps(made)
    def make(self: ValueT, *values: object, **named: object) -> None:
        if not named.keys() <= set(known):
            for name in inner.keys() & named.keys():
                place, of = inner[name]
                hint = f"write {kind.__name__}({place}={of.__name__}({name}=...))"
                raise ConfigError(f"{kind.__name__}: unknown: {name}; it is a field of {of.__name__}: {hint}")
            check_known(named, known, where=kind.__name__)
        made(self, *values, **named)

    kind.__init__ = make  # type: ignore[assignment]
    return kind
