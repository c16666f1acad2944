"""One reader for all ranks: the first one reads the events and gives every batch to all.

So a stream is read once, its dead letters, offsets and acknowledgements are of one reader, and all
ranks see the same batches in the same order. A batch travels as its arrays are.

Shapes: as in base.py.
"""

import contextlib
import json
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import Batch, DerivedSource, EventSource, Origin
from embertide.trainer.sync.channel import Channel, RankError, error_of

_ARRAYS = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")
_BESIDE = ("weight_B", "more_labels_BL", "id_B")  # which a batch may lack
_ORIGIN = ("part_B", "index_B", "feedback_B")
_END = b"\0end"
_STILL = b"\0still"  # there are no events now; others would else give up waiting
_STILL_EVERY_S = 30.0
_FAILED = b"\0failed"


def packed(batch: Batch) -> bytes:
    """Return a batch as bytes: the length of a header, the header as JSON, then its arrays."""
    arrays: list[NDArray[Any]] = [getattr(batch, name) for name in _ARRAYS]
    lists = []
    for f, bags in batch.lists.items():
        lists.append([f, bags.weights_N is not None])
        arrays += (bags.keys_N, bags.offsets_B1)
        arrays += () if bags.weights_N is None else (bags.weights_N,)
    beside = [name for name in _BESIDE if getattr(batch, name) is not None]
    arrays += [getattr(batch, name) for name in beside]
    more: dict[str, Any] = {}
    if batch.origin is not None:
        arrays += (getattr(batch.origin, name) for name in _ORIGIN)
        more = {"cursor": batch.origin.cursor, "next_cursor": batch.origin.next_cursor}
    header = {
        "beside": beside,
        "first": batch.first,
        "next_offset": batch.next_offset,
        "lists": lists,
        "cursors": more,
        "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
    }
    text = json.dumps(header).encode()
    bodies = (np.ascontiguousarray(array).tobytes() for array in arrays)
    return b"".join((struct.pack("<I", len(text)), text, *bodies))


def unpacked(data: bytes | bytearray) -> Batch:
    """Return the batch of `packed`."""
    data = bytearray(data)  # whose arrays may be written to, as those of any batch
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    at = 4 + length
    arrays: list[NDArray[Any]] = []
    for dtype, shape in header["arrays"]:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
        at += arrays[-1].nbytes
    rest = iter(arrays[len(_ARRAYS) :])
    lists = {
        f: Bags(next(rest), next(rest), next(rest) if weighed else None)
        for f, weighed in header["lists"]
    }
    named: dict[str, Any] = dict(zip(_ARRAYS, arrays, strict=False))
    named |= {name: next(rest) for name in header["beside"]}
    if header["cursors"]:
        origin: dict[str, Any] = {name: next(rest) for name in _ORIGIN}
        origin |= {name: tuple(at) for name, at in header["cursors"].items()}
        named["origin"] = Origin(**origin)
    return Batch(first=header["first"], next_offset=header["next_offset"], lists=lists, **named)


class SharedEvents(DerivedSource):
    """The events of the first rank's `source`, on all ranks.

    Used by one thread, but for `stop` and `idle`. Other ranks' `source` tells the schema alone.
    """

    def __init__(self, source: EventSource, channel: Channel) -> None:
        """Share a source over a channel of the reader's thread."""
        super().__init__(source)
        self._channel = channel
        self._ended = False
        self._sending = threading.Lock()  # of the channel and what follows, on the first rank
        self._sent = time.monotonic()

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yield the first rank's batches; on all ranks it raises what the source there does.

        Raises:
            RankLostError: A rank is gone.
        """
        self._ended = False
        return self._given(batch_size, start) if self._channel.first else self._received()

    def stop(self) -> None:
        """End the stream after the batch that was given last; on the first rank."""
        with self._sending:
            self._send(_END)

    def idle(self) -> None:
        """Say that the stream goes on, though it has no events; on the first rank, now and then."""
        with self._sending:
            if time.monotonic() > self._sent + _STILL_EVERY_S:
                self._send(_STILL)

    def _send(self, data: bytes) -> None:
        self._sent = time.monotonic()
        if not self._ended:
            self._ended = data.startswith((_END, _FAILED))
            self._channel.from_first(data, "events")

    def _given(self, batch_size: int, start: int) -> Iterator[Batch]:
        try:
            for batch in self._source.batches(batch_size=batch_size, start=start):
                with self._sending:
                    if self._ended:
                        return
                    self._send(packed(batch))
                yield batch
        except GeneratorExit:
            raise
        except Exception as error:
            words = json.dumps([type(error).__name__, str(error)]).encode()
            with self._sending:
                self._send(_FAILED + words)
            raise
        finally:
            with contextlib.suppress(RankError):
                self.stop()

    def _received(self) -> Iterator[Batch]:
        try:
            while (data := self._channel.from_first(None, "events")) != _END:
                if data.startswith(_FAILED):
                    self._ended = True
                    raise error_of(0, json.loads(data[len(_FAILED) :]))
                if data != _STILL:
                    yield unpacked(data)
            self._ended = True
        except RankError:
            self._ended = True
            raise
        finally:
            # Whoever leaves early takes what the first rank has sent before it knew.
            with contextlib.suppress(RankError):
                while not self._ended:
                    data = self._channel.from_first(None, "events")
                    self._ended = data.startswith((_END, _FAILED))
