"""What ranks send each other, and whether they mean the same call.

Every message begins with a header, which says of which call it is: with which operator, sizes, dtypes and
options. A collective takes messages of one size, so a rank that makes another call must not send one of
another size. What it can know is what the others are about to send, if they go on as before: the message
that followed the last two when these were sent before. In the format of that message it sends its header and
no data. Then all ranks see that the headers differ, tell each other their calls, and raise. If all ranks have
made another call, and the same one, they send its message once more, with data. So a step that is like those
before takes no further collective.

That is so for messages on the CPU. On a GPU the host would have to wait for the headers. There a group's
first call of an operator compares all. The header of a later one is looked at before the first call or
message that comes after its arrival.
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

# To be called once: the current stream waits for a tensor that is on its way, the host does not on a GPU.
Arrival = Callable[[], Tensor]

# Its name in later versions of torch; earlier ones have the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# A header: which message of which call, the number of the call, and a word for each fact of the call.
_TAG_BYTES, _NUMBER_BYTES, _WORD_BYTES, _WORDS = 16, 16, 4, 24
HEADER_BYTES = _TAG_BYTES + _NUMBER_BYTES + _WORD_BYTES * _WORDS  # a multiple of any element's
_FAILED = b"\xff" * HEADER_BYTES  # of a rank that raises an error
_KEPT = 4096  # calls and messages that are remembered, at most
_ERRORS = {error.__name__: error for error in (TypeError, ValueError, IndexError, RuntimeError)}


class Facts(NamedTuple):
    """The sizes, dtypes and options of a call, which must be the same on all ranks.

    key: equal keys mean equal facts; it takes a few microseconds to make. tell: returns the facts by name.
    waiting: returns those that the host must wait for a GPU to read. Only first calls compare them.
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
        """Made once for each key."""
        key = operator, facts.key
        found = _calls.get(key)
        if found is None:
            if len(_calls) >= _KEPT:
                _calls.clear()
            found = _calls[key] = cls(operator, facts.tell())
        return found

    @cached_property
    def words(self) -> bytes:
        """One for each fact; the last one is of all that have none."""
        parts = [f"{name}={value}" for name, value in self.facts.items()]
        parts[_WORDS - 1 :] = ["; ".join(parts[_WORDS - 1 :])] if len(parts) >= _WORDS else []
        found = b"".join(blake2b(part.encode(), digest_size=_WORD_BYTES).digest() for part in parts)
        return found.ljust(_WORDS * _WORD_BYTES, b"\0")

    @cached_property
    def _digest(self) -> bytes:
        return blake2b(json.dumps([__version__, *self.facts.items()]).encode()).digest()

    def message(self, kind: str, number: int, parts: Tensor) -> Message:
        """kind: see Message. number: in the call. parts: [elements] of a gather, else [ranks, elements]."""
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
    """A "gather" of [elements] from each rank, or an "exchange" of [ranks, elements]."""

    tag: bytes
    kind: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    size: str

    def header(self, call: Call, number: int = 0) -> bytes:
        """number: of the call; 0 on a GPU, where headers are kept."""
        return self.tag + number.to_bytes(_NUMBER_BYTES, "little") + call.words

    def start(self, group: Group, header: Tensor, parts: Tensor | None) -> tuple[dist.Work, Tensor]:
        """[ranks, header and elements], on their way. parts: None sends the bits of NaN."""
        if parts is None:
            parts = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            if parts.numel():
                parts.view(-1).view(torch.uint8).fill_(255)
        own = header.view(self.dtype)
        if self.kind != "gather":
            own = own.expand(len(parts), -1)
        return _start(group, self.kind, torch.cat((own, parts), -1))


def _start(group: Group, kind: str, sent: Tensor) -> tuple[dist.Work, Tensor]:
    """A collective: what it found [ranks, elements], on its way."""
    found = sent.new_empty(group.size, sent.shape[-1])
    collective = _all_gather if kind == "gather" else dist.all_to_all_single
    return collective(found.view(-1), sent.view(-1), group=group.handle, async_op=True), found


def _arrived(work: dist.Work, found: Tensor) -> Tensor:
    """found, which a collective fills, for the current stream."""
    work.wait()
    return found


class _Headers(NamedTuple):
    """The headers of all ranks, on their way from a GPU."""

    of_ranks: Tensor
    arrived: torch.cuda.Event
    own: bytes
    call: Call


class Channel:
    """The messages of one group, and what its ranks know alike of them."""

    _of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Channel]] = WeakKeyDictionary()

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self.silent = dist.get_backend(handle) == "fake"  # torch's group of tests, which sends nothing
        self.under_way: deque[_Headers] = deque()
        self._headers: dict[Any, Tensor] = {}  # on GPUs
        self._forget()

    @classmethod
    def of(cls, group: Group) -> Channel:
        found = cls._of_groups.get(group.handle)
        if found is None:
            found = cls._of_groups[group.handle] = cls(group.handle)
        return found

    def _forget(self) -> None:
        """After an error, on all ranks alike."""
        self.calls = 0
        self.first: Message | None = None  # of the last call
        self.last = b"", b""  # the tags of the last two messages
        self.following: dict[Any, Message] = {}  # such two, and such a last one
        self.compared: set[str] = set()  # operators, on GPUs
        self.under_way.clear()

    @staticmethod
    def _at_once(device: torch.device) -> bool:
        """Are headers of messages there compared before their data is used."""
        return device.type == "cpu"

    @property
    def expected(self) -> Message | None:
        """What all ranks send next if they go on as before; None where they have sent nothing."""
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
        """Send parts, in one piece and as `Message` has them -> [ranks, elements].

        headed: is there a header also on a GPU, where it costs a copy.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: the ranks differ, or one of them failed.
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
        """Let the ranks that send the next message raise this rank's error, too.

        On a GPU they get NaN from this rank, and raise when they look at its header.

        Raises:
            ValueError: the ranks are in calls that differ, which explains the error.
        """
        if group.size == 1 or self.silent:
            return
        expected, difference = self.expected, None
        with suppress(RuntimeError):  # such as the group's timeout: the error itself says more
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
        """Raise if a header that has arrived is of another call. The host waits for nothing."""
        while self.under_way and self.under_way[0].arrived.query():  # type: ignore[no-untyped-call]
            headers = self.under_way.popleft()
            found = [bytes(row) for row in headers.of_ranks.view(torch.uint8).tolist()]
            if any(header != headers.own for header in found):
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
        """What all ranks sent; None if their headers differ, or are those of an error."""
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
        """Exchange all facts.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: an error of another rank, or two that differ.
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
        """The records of all ranks."""
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
    """The record of a rank that fails. Before its arguments were found right it has no facts."""
    kind = next((t.__name__ for t in type(error).__mro__ if t.__name__ in _ERRORS), "RuntimeError")
    text = str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}"
    facts = {} if group.call is NO_CALL else group.call.facts
    return {**facts, "error": kind, "text": text}


def _error(records: list[dict[str, str]]) -> Exception | None:
    """What a rank raised."""
    for rank, of_rank in enumerate(records):
        if "error" in of_rank:
            return _ERRORS[of_rank["error"]](f"rank {rank}: {of_rank['text']}")
    return None


def _difference(records: list[dict[str, str]]) -> ValueError | None:
    """The first one between calls. A rank that failed tells the facts of its call, or none."""
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
    """Of headers that differ: which rank, and in which fact. Of values only this rank's are known."""
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
