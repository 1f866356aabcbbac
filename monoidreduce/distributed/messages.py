"""Messages between ranks, and the check that all ranks are in the same call.

If one rank calls another operator, or the same with other sizes, plain collectives hang or return garbage. So
every message begins with a header that identifies its call: operator, sizes, dtypes and options.

All parts of a collective must have the same size, so a rank in another call must still send a message of the
size that the others expect. It predicts that message: what followed the last two messages when they were sent
before. It sends its header in the format of that prediction, without data. All ranks then see that the
headers differ, exchange the full description of their calls, and raise. If instead all ranks are in the same
new call, the headers agree, and they send its message again with data. A step that repeats earlier ones
therefore needs no extra collective.

This holds for messages on the CPU. On a GPU, reading a header would make the host wait. There the first call
of an operator on a group compares everything up front. Headers of later calls are copied to the host, and
checked once they have arrived, before the next call or message.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from monoidreduce._torch_private import is_captured
from monoidreduce._validate import mismatch
from monoidreduce._version import __version__

if TYPE_CHECKING:
    from monoidreduce.distributed.group import Group

__all__ = ["HEADER_BYTES", "NO_CALL", "Arrival", "Call", "Channel", "Facts"]

# A function, to be called once, that returns a tensor which is on its way. The current stream waits for it;
# on a GPU the host does not.
Arrival = Callable[[], Tensor]

# Later versions of torch renamed all_gather_into_tensor.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# A header: a hash of the message and its call, the number of the call, and a hash for each fact of the call.
_TAG_BYTES, _NUMBER_BYTES, _WORD_BYTES, _WORDS = 16, 16, 4, 24
HEADER_BYTES = _TAG_BYTES + _NUMBER_BYTES + _WORD_BYTES * _WORDS  # a multiple of every element size
_FAILED = b"\xff" * HEADER_BYTES  # header of a rank that raised an error
_KEPT = 4096  # maximum number of calls and messages that are remembered
_ERRORS = {error.__name__: error for error in (TypeError, ValueError, IndexError, RuntimeError)}


class Facts(NamedTuple):
    """The sizes, dtypes and options of a call, which must be the same on all ranks.

    key: equal keys mean equal facts; it takes a few microseconds to make. tell: returns the facts by name.
    waiting: returns facts that the host must wait for a GPU to read; only first calls compare them.
    """

    key: Hashable
    tell: Callable[[], dict[str, Any]]
    waiting: Callable[[], dict[str, Any]] = dict


class Call:
    """An operator, and the facts that ranks must agree on."""

    def __init__(self, operator: str, facts: dict[str, Any]) -> None:
        self.operator = operator
        self.facts = {"operator": operator, **{name: str(value) for name, value in facts.items()}}
        self._messages: dict[Any, Message] = {}

    @classmethod
    def of(cls, operator: str, facts: Facts) -> Call:
        """The call of these facts; cached by facts.key."""
        key = operator, facts.key
        found = _calls.get(key)
        if found is None:
            if len(_calls) >= _KEPT:
                _calls.clear()
            found = _calls[key] = cls(operator, facts.tell())
        return found

    @cached_property
    def words(self) -> bytes:
        """A 4-byte hash of each fact. If there are more facts than words, the last word hashes the rest."""
        parts = [f"{name}={value}" for name, value in self.facts.items()]
        parts[_WORDS - 1 :] = ["; ".join(parts[_WORDS - 1 :])] if len(parts) >= _WORDS else []
        found = b"".join(blake2b(part.encode(), digest_size=_WORD_BYTES).digest() for part in parts)
        return found.ljust(_WORDS * _WORD_BYTES, b"\0")

    @cached_property
    def _digest(self) -> bytes:
        return blake2b(json.dumps([__version__, *self.facts.items()]).encode()).digest()

    def message(self, kind: str, number: int, parts: Tensor) -> Message:
        """The message with this number in the call; cached.

        kind: "gather" or "exchange". parts: its data, [elements] for a gather, else [ranks, elements].
        """
        key = kind, number, parts.shape, parts.dtype, parts.device
        found = self._messages.get(key)
        if found is None:
            if len(self._messages) >= _KEPT:
                self._messages.clear()
            size = f"number {number} of the call, a {kind} of {list(parts.shape)} {parts.dtype}"
            tag = blake2b(self._digest + size.encode(), digest_size=_TAG_BYTES).digest()
            found = self._messages[key] = Message(tag, kind, parts.shape, parts.dtype, parts.device, size)
        return found


_calls: dict[Any, Call] = {}
NO_CALL = Call("", {})


class Message(NamedTuple):
    """The format of a message: a "gather" of [elements] from each rank, or an "exchange" of [ranks,
    elements].

    tag: hash of the call and of `size`, which describes the message in words.
    """

    tag: bytes
    kind: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    size: str

    def header(self, call: Call, number: int = 0) -> bytes:
        """The header's bytes. number: of the call; 0 on a GPU, so that headers can be cached there."""
        return self.tag + number.to_bytes(_NUMBER_BYTES, "little") + call.words

    def start(self, group: Group, header: Tensor, parts: Tensor | None) -> tuple[dist.Work, Tensor]:
        """Start the collective. Its result is [ranks, header and elements].

        parts: the data; None sends bytes of 255, which are NaN in every floating dtype.
        """
        if parts is None:
            parts = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            if parts.numel():
                parts.view(-1).view(torch.uint8).fill_(255)
        own = header.view(self.dtype)
        if self.kind != "gather":
            own = own.expand(len(parts), -1)
        return _start(group, self.kind, torch.cat((own, parts), -1))


def _start(group: Group, kind: str, sent: Tensor) -> tuple[dist.Work, Tensor]:
    """Start a collective of `kind`; returns its handle and the tensor [ranks, elements] that it fills."""
    found = sent.new_empty(group.size, sent.shape[-1])
    collective = _all_gather if kind == "gather" else dist.all_to_all_single
    return collective(found.view(-1), sent.view(-1), group=group.handle, async_op=True), found


def _arrived(work: dist.Work, found: Tensor) -> Tensor:
    """Let the current stream wait for a collective that fills `found`; returns found."""
    work.wait()
    return found


class _Headers(NamedTuple):
    """The headers of all ranks, being copied from a GPU. arrived: recorded after the copy."""

    of_ranks: Tensor
    arrived: torch.cuda.Event
    own: bytes
    call: Call


class Channel:
    """The messages of one process group: the history from which all its ranks predict the next message."""

    _of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Channel]] = WeakKeyDictionary()

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self.silent = dist.get_backend(handle) == "fake"  # torch's backend for tests, which sends nothing
        self.under_way: deque[_Headers] = deque()
        self._headers: dict[Any, Tensor] = {}  # headers cached on GPUs
        self._forget()

    @classmethod
    def of(cls, group: Group) -> Channel:
        found = cls._of_groups.get(group.handle)
        if found is None:
            found = cls._of_groups[group.handle] = cls(group.handle)
        return found

    def _forget(self) -> None:
        """Reset the history after an error. All ranks do this, so their histories stay equal."""
        self.calls = 0
        self.first: Message | None = None  # first message of the last call
        self.last = b"", b""  # the tags of the last two messages
        # The message that followed, keyed by the tags of the two messages before it, and by the last tag
        # alone.
        self.following: dict[Any, Message] = {}
        self.compared: set[str] = set()  # operators whose first call on a GPU was compared
        self.under_way.clear()

    @staticmethod
    def _at_once(device: torch.device) -> bool:
        """Whether headers of messages on this device are compared before the data is used."""
        return device.type == "cpu"

    @property
    def expected(self) -> Message | None:
        """Prediction of the next message, from the history; None if nothing was sent yet."""
        known = self.following.get(self.last)
        return known or self.following.get(self.last[1], self.first)

    def _sent(self, message: Message, is_first: bool) -> None:
        if is_first:
            self.first = message
        if len(self.following) >= _KEPT:
            self.following.clear()
        self.following[self.last] = self.following[self.last[1]] = message
        self.last = self.last[1], message.tag

    def start(self, group: Group, kind: str, parts: Tensor, headed: bool) -> Arrival:
        """Send parts, which are contiguous and shaped as in `Message`; the result is [ranks, elements].

        headed: send a header even on a GPU, where it costs a copy.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: the ranks are in different calls, or one failed.
        """
        if group.size == 1 or type(parts) is not Tensor:  # fake tensors cannot be compared
            return partial(_arrived, *_start(group, kind, parts))
        words = parts.view(torch.uint8) if parts.dtype == torch.bool else parts
        group.sent += 1
        message, is_first = group.call.message(kind, group.sent, words), group.sent == 1
        if is_first:
            self.calls += 1
            group.number = self.calls
        send = self._compared_at_once if self._at_once(words.device) else self._compared_later
        arrival = send(group, message, words, is_first, headed)
        return arrival if words is parts else lambda: arrival().contiguous().view(parts.dtype)

    def fail(self, group: Group, operator: str, error: Exception) -> None:
        """Tell the other ranks, at their next message, that this rank raised `error`; they raise it too.

        On a GPU they get NaN as this rank's data, and raise once they have read its header.

        Raises:
            ValueError: the ranks are in different calls, which explains the error.
        """
        if group.size == 1 or self.silent:
            return
        expected, difference = self.expected, None
        with suppress(RuntimeError):  # for example the group's timeout; the original error says more
            if expected is not None and not self._at_once(expected.device):
                if operator in self.compared and not _debugging():
                    expected.start(group, self._on_gpu(_FAILED, expected), None)[0].wait()
                    self._forget()
                    return
            elif expected is not None:
                self._heard(group, expected, _FAILED, None)
            difference = _difference(self._records(group, _failure(group, error)))
        self._forget()
        if difference is not None:
            raise difference from error

    def look(self) -> None:
        """Raise if a header that has arrived from a GPU belongs to another call. Does not wait."""
        while self.under_way and self.under_way[0].arrived.query():  # type: ignore[no-untyped-call]
            headers = self.under_way.popleft()
            found = [bytes(row) for row in headers.of_ranks.view(torch.uint8).tolist()]
            if not self.silent and any(header != headers.own for header in found):
                self._forget()
                raise _different(headers.call, headers.own, found)

    def _compared_at_once(
        self, group: Group, message: Message, parts: Tensor, is_first: bool, _: bool
    ) -> Arrival:
        header = message.header(group.call, group.number)
        if self.expected is None:
            self._compare(group, message)
            self.first = message
        while True:
            assert self.expected is not None
            as_expected = self.expected.tag == message.tag
            found = self._heard(group, self.expected, header, parts if as_expected else None)
            if found is None:
                self._compare(group, message)
                raise RuntimeError(
                    f"{message.size}: the ranks differ in what they send, and no fact says how"
                )
            if as_expected:
                self._sent(message, is_first)
                return partial(_itself, found)
            self.following[self.last] = message

    def _heard(self, group: Group, message: Message, header: bytes, parts: Tensor | None) -> Tensor | None:
        """Send header and parts in the format of `message`; returns the data of all ranks.

        Returns None if the headers of the ranks differ, or if this rank reports an error.
        """
        own = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        work, found = message.start(group, own, parts)
        work.wait()
        of_ranks = found.view(torch.uint8)[:, :HEADER_BYTES]
        same = self.silent or (header != _FAILED and torch.equal(of_ranks, own.expand(group.size, -1)))
        return found[:, HEADER_BYTES // found.element_size() :] if same else None

    def _compared_later(
        self, group: Group, message: Message, parts: Tensor, is_first: bool, headed: bool
    ) -> Arrival:
        self.look()
        call = group.call
        if call.operator not in self.compared or (is_first and _debugging()):
            self._compare(group, message)
            self.compared.add(call.operator)
        self._sent(message, is_first)
        if not headed or is_captured():
            return partial(_arrived, *_start(group, message.kind, parts))
        header = message.header(call)
        work, found = message.start(group, self._on_gpu(header, message), parts)

        def arrived() -> Tensor:
            work.wait()
            width = HEADER_BYTES // found.element_size()
            of_ranks = found[:, :width].to("cpu", non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.under_way.append(_Headers(of_ranks, event, header, call))
            return found[:, width:]

        return arrived

    def _on_gpu(self, header: bytes, message: Message) -> Tensor:
        key = header, message.device
        found = self._headers.get(key)
        if found is None:
            if len(self._headers) >= _KEPT:
                self._headers.clear()
            own = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            found = self._headers[key] = own.to(message.device)
        return found

    def _compare(self, group: Group, message: Message) -> None:
        """Exchange and compare all facts of the call.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: another rank reports an error, or facts differ.
        """
        if self.silent:
            return
        waiting = {name: str(value) for name, value in group.waiting().items()}
        of_message = {"message": message.size, "calls on the group": str(group.number)}
        records = self._records(group, group.call.facts | waiting | of_message)
        error = _difference(records) or _error(records)
        if error is not None:
            self._forget()
            raise error

    @staticmethod
    def _records(group: Group, record: dict[str, str]) -> list[dict[str, str]]:
        """All-gather a dict of strings; returns the dicts of all ranks."""
        own = json.dumps({"version": __version__, **record}).encode()
        text = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(group.device)

        def gathered(sent: Tensor) -> Tensor:
            return _arrived(*_start(group, "gather", sent))

        lengths: list[int] = gathered(torch.tensor([len(own)], device=group.device)).flatten().tolist()
        rows = gathered(torch.nn.functional.pad(text, (0, max(lengths) - len(own)))).tolist()
        return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


def _itself(found: Tensor) -> Tensor:
    return found


def _debugging() -> bool:
    return os.environ.get("MONOIDREDUCE_DEBUG") == "1"


def _failure(group: Group, error: Exception) -> dict[str, str]:
    """The record of a rank that failed. It has no facts if the check of its arguments failed."""
    kind = next((t.__name__ for t in type(error).__mro__ if t.__name__ in _ERRORS), "RuntimeError")
    text = str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}"
    facts = {} if group.call is NO_CALL else group.call.facts
    return {**facts, "error": kind, "text": text}


def _error(records: list[dict[str, str]]) -> Exception | None:
    """The error of the first rank that reports one; None if there is none."""
    for rank, of_rank in enumerate(records):
        if "error" in of_rank:
            return _ERRORS[of_rank["error"]](f"rank {rank}: {of_rank['text']}")
    return None


def _difference(records: list[dict[str, str]]) -> ValueError | None:
    """An error that names the first fact that differs between ranks; None if none does.

    A failed rank may report only some facts or none; missing ones do not count as different then.
    """
    failed = any("error" in of_rank for of_rank in records)
    told = [(rank, of_rank) for rank, of_rank in enumerate(records) if "operator" in of_rank]
    for rank, of_rank in told:
        _, first = told[0]
        for name in {**first, **of_rank}:
            expected, here = first.get(name), of_rank.get(name)
            if expected != here and not (failed and (expected is None or here is None)):
                return ValueError(
                    f"rank {rank}: {mismatch(name, f'{expected} as on rank {told[0][0]}', here)}"
                )
    return None


def _different(call: Call, own: bytes, found: list[bytes]) -> Exception:
    """The error for headers that differ: it names the rank and the fact.

    Headers hold only hashes, so the message can show this rank's value, but not that of others.
    """
    if _FAILED in found:
        where = f"rank {found.index(_FAILED)}: raised an error"
        return RuntimeError(f"{where}, while other ranks called {call.operator}; its own message tells which")
    rank = next(i for i, header in enumerate(found) if header != found[0])
    words = [header[_TAG_BYTES + _NUMBER_BYTES :] for header in (found[0], found[rank], own)]
    facts = [*call.facts.items()]
    for i in range(_WORDS):
        at = slice(i * _WORD_BYTES, (i + 1) * _WORD_BYTES)
        first, here, mine = (each[at] for each in words)
        if first != here:
            others = ("an argument", "what it is here")
            name, value = facts[i] if i < min(len(facts), _WORDS - 1) else others
            as_first, given = (value if word == mine else "another value" for word in (first, here))
            return ValueError(f"rank {rank}: {mismatch(name, f'{as_first} as on rank 0', given)}")
    return RuntimeError(f"rank {rank}: another message of {call.operator} than on rank 0")
