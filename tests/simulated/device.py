"""A CUDA device that is not there: real values, computed on the CPU, under a GPU's rules.

Import it first: it loads the library named by `SIMULATED_GUARD`, which torch must find there.
Within `simulated()` a tensor "on cuda:0" is an `OnDevice`: its storage is ordinary memory, its
dispatch keys are CUDA's. A mode sees every operation, runs it on the CPU, and says

- raises, as CUDA would, where operands are on two devices,
- `races`: uses of memory whose order no stream, event or wait of the host ensures,
- `waits`: where the host waits for the device, by line of colotrain,
- `launches`: operations on the device, by line of colotrain,
- `allocated`, `peak`: bytes as the caching allocator counts them; a `limit` raises OutOfMemory.

A stream's work is done in the order of the program, whatever the streams: a race shows in the
clocks (`ordering`), not in the values.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_guard = ctypes.CDLL(os.environ["SIMULATED_GUARD"], ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
import torch.distributed.device_mesh as device_mesh  # noqa: E402
import torch.distributed.fsdp._fully_shard._fsdp_init as fsdp_init  # noqa: E402
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param  # noqa: E402
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_group  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from colotrain.engine.comms.raw_bytes import bytes_of  # noqa: E402
from colotrain.engine.state import shard_file  # noqa: E402
from tests.simulated.ordering import Access, Memory, Timeline  # noqa: E402

assert _guard.install(), "torch was imported before tests.simulated.device"

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
ROUND = 512
"""The caching allocator hands out multiples of so many bytes."""
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")
MIXED = ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")
"""CUDA's kernels take their indices from the CPU as well."""
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
"""The host needs the result before it can go on."""
UNTOUCHED = ("aten::detach", "aten::alias", "aten::lift_fresh")
WITH_KERNELS = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
"""Operations that are taken apart on devices without a kernel of their own: CUDA has one."""


class OnDevice(Tensor):
    """A tensor on the simulated device, over memory of the CPU."""

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        return Tensor._make_subclass(
            cls, values, False, dispatch_device=True, device_for_backend_keys=CUDA
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current().run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def record_stream(self, stream: Stream) -> None:
        current().memory_of(self).recorded.add(stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({values_of(self)!r})"


def values_of(tensor: Tensor) -> Tensor:
    """The CPU tensor over the same storage."""
    with torch._C._DisableTorchDispatch():
        values = torch.empty(0, dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        return values.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors in an operation's arguments or results: several times faster than pytree."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from tensors_in(each)
    elif isinstance(given, dict):
        yield from tensors_in(tuple(given.values()))


def mapped(change: Callable[[Any], Any], given: Any) -> Any:
    """`given`, with its leaves changed."""
    if isinstance(given, (tuple, list)):
        return type(given)([mapped(change, each) for each in given])
    if isinstance(given, dict):
        return {key: mapped(change, each) for key, each in given.items()}
    return change(given)


def line(depth: int = 2) -> str:
    """The innermost lines of colotrain that are being run, or else of torch's FSDP."""
    frame: types.FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < depth:
        name = frame.f_code.co_filename
        if "/colotrain/" in name and "/tests/" not in name:
            found.append(f"{name.rsplit('/colotrain/', 1)[1]}:{frame.f_lineno}")
        elif "/torch/distributed/fsdp" in name and not found:
            found.append(f"torch {name.rsplit('/', 1)[1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "test"


class Stream(Timeline):
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        gpu = current()
        super().__init__(f"stream {len(gpu.streams)}")
        self.stream_id = self.cuda_stream = len(gpu.streams)
        self.device, self.priority = CUDA, priority
        gpu.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.known)

    def wait_event(self, event: Event) -> None:
        self.follow(event.known)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        current().wait("Stream.synchronize", self.known)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        current().entered().append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        current().entered().pop()


class Event:
    """torch.cuda.Event; its time in ms is the number of things done before it."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.known: dict[Timeline, int] = {}
        self.at, self.enable_timing = 0, enable_timing

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current().stream
        self.known, self.at = dict(stream.known), current().num_launches

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current().stream).wait_event(self)

    def synchronize(self) -> None:
        current().wait("Event.synchronize", self.known)

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        host = current().host.known
        for event in (self, later):
            assert event.enable_timing, "an event without a time"
            open_ = [t.name for t, tick in event.known.items() if host.get(t, 0) < tick]
            assert not open_, f"an event is read before it is over: {open_}"
        return float(later.at - self.at)


class Device:
    """The simulated device, and what was seen of it."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.streams: list[Stream] = []
        self.host = Timeline("the host")
        self.memory: dict[int, Memory] = {}
        """Storage → its uses; those of the CPU only once a copy has used them."""
        self.pinned: dict[int, int] = {}
        """Address → bytes that are page-locked."""
        self.open: dict[Timeline, list[tuple[Access, str]]] = {}
        """Stream → uses of memory that was freed to its pool, which may not be over."""
        self.races, self.waits, self.launches = Counter[str](), Counter[str](), Counter[str]()
        self.kinds = Counter[str]()
        self.num_launches = self.allocated = self.peak = self.pinned_bytes = 0
        self.thread = threading.local()

    def forget(self) -> None:
        """Count waits, launches and the peak from here on."""
        for counter in (self.waits, self.launches, self.kinds):
            counter.clear()
        self.peak = self.allocated

    # -- order

    def entered(self) -> list[Stream]:
        """The streams that this thread has entered."""
        if not hasattr(self.thread, "streams"):
            self.thread.streams = [self.streams[0]]
        return self.thread.streams

    @property
    def stream(self) -> Stream:
        return self.entered()[-1]

    def wait(self, what: str, known: dict[Timeline, int]) -> None:
        """The host waits for what is in `known`."""
        self.waits[f"{what} @ {line()}"] += 1
        self.host.follow(known)

    def synchronize(self, *_: Any) -> None:
        for stream in self.streams:
            self.host.follow(stream.known)
        self.waits[f"synchronize @ {line()}"] += 1

    # -- memory

    def memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        found = self.memory.get(storage._cdata)
        if found is None:
            found = Memory(self.stream, isinstance(tensor, OnDevice), line())
            self.memory[storage._cdata] = found
            weakref.finalize(storage, self._gone, storage._cdata, found)
        if found.on_device and found.num_bytes == 0 and storage.nbytes():
            self.resize(found, storage.nbytes())
        return found

    def resize(self, memory: Memory, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // ROUND) * ROUND
        if num_bytes > memory.num_bytes:  # it may be what another stream still uses
            for use, made in self.open.pop(memory.home, ()):
                if not (use.is_over_for(memory.home) or use.is_over_for(self.host)):
                    text = f"{memory.home.name} is given, at {line()}, memory of {made}, which"
                    self.races[f"{text} {use.by.name} uses in {use.what}"] += 1
        self.allocated += num_bytes - memory.num_bytes
        memory.num_bytes = num_bytes
        self.peak = max(self.peak, self.allocated)
        if self.limit is not None and self.allocated > self.limit:
            text = f"{self.allocated:,} bytes of {self.limit:,} on the device @ {line(6)}"
            raise torch.OutOfMemoryError(text)

    def free(self, memory: Memory) -> None:
        if memory.on_device:
            for use in memory.left_open():
                self.open.setdefault(memory.home, []).append((use, memory.made))
            self.resize(memory, 0)
        memory.written, memory.read, memory.recorded = None, {}, set()

    def _gone(self, key: int, memory: Memory) -> None:
        if self.memory.get(key) is memory:
            self.free(memory)
            del self.memory[key]

    def pin(self, address: int, num_bytes: int, taken: int) -> None:
        self.pinned[address] = num_bytes
        self.pinned_bytes += taken

    def is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(start <= at < start + size for start, size in self.pinned.items())

    def _make_pinned(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.pin(storage.data_ptr(), size, 1 << max(0, size - 1).bit_length())  # as torch rounds
        weakref.finalize(storage, self.pinned.pop, storage.data_ptr(), None)
        return tensor

    # -- operations

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:
            return CUDA if isinstance(args[0], OnDevice) else args[0].device
        name = func._schema.name
        tensors = list(tensors_in((args, kwargs)))
        here = any(isinstance(tensor, OnDevice) for tensor in tensors)
        if name == "aten::is_pinned":
            return self.is_pinned(args[0])
        if name == "aten::_pin_memory":
            return self._make_pinned(values_of(args[0]).clone())
        if name == "aten::_fused_sdp_choice" and here:
            return choose_attention(*args, **kwargs)
        if "_attention" in name and here:
            return self._attend(func, name, args, kwargs, tensors)
        if name.startswith("aten::_fused_rms_norm") and here:
            return self._normalize(name, args, tensors)
        asked = kwargs.get("device")
        to = torch.device(asked).type if asked is not None else "cuda" if here else "cpu"
        if not here and to != "cuda" and not kwargs.get("pin_memory"):
            self._on_host(func, name, args, kwargs)
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors):
            if to == "meta" or asked is None:
                return func(*args, **kwargs)
            blank = func(*args, **{**kwargs, "device": "meta"})
            made = torch.empty_strided(blank.shape, blank.stride(), dtype=blank.dtype)
            return self._launched(name, [], [], OnDevice(made))
        self._check_devices(name, tensors)
        waits = self._waits(name, args, kwargs, to)
        result = self._compute(func, name, args, kwargs, to)
        written = list(_written(func, args, kwargs))
        if name not in UNTOUCHED and not getattr(func, "is_view", False):
            self._launched(name, tensors, written, result, asynchronous=not waits)
        if waits:
            self.wait(waits, self.stream.known)
        return result

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], to: str) -> Any:
        """Run it on the CPU; results are on the device where CUDA's would be."""
        own: dict[int, Tensor] = {}
        kept = []

        def down(leaf: Any) -> Any:
            if not isinstance(leaf, OnDevice):
                return leaf
            values = values_of(leaf)
            own[id(values)] = leaf
            kept.append(values)
            return values

        def up(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, OnDevice):
                return leaf
            if id(leaf) in own:
                return own[id(leaf)]
            if any(leaf is given for given in args):  # the CPU's tensor that was copied to
                return leaf
            return OnDevice(leaf) if to == "cuda" and leaf.device.type == "cpu" else leaf

        pins = kwargs.get("pin_memory")
        kwargs = {k: False if k == "pin_memory" and v else v for k, v in kwargs.items()}
        if kwargs.get("device") is not None and to == "cuda":
            kwargs["device"] = torch.device("cpu")
        out = func(*mapped(down, args), **mapped(down, kwargs))
        if name == "aten::_to_copy":
            source = kept[0] if kept else args[0]
            if out.untyped_storage()._cdata == source.untyped_storage()._cdata:
                out = out.clone()
            if to == "cpu" and kept and kwargs.get("non_blocking"):  # as torch allocates it
                self._make_pinned(out)
        if name == "aten::_local_scalar_dense":
            return out
        result = mapped(up, out)
        return self._make_pinned(result) if pins else result

    def _launched(
        self,
        name: str,
        tensors: list[Tensor],
        written: list[Tensor],
        result: Any,
        *,
        asynchronous: bool = True,
    ) -> Any:
        """Note that the current stream does it, after all that the host knows."""
        stream = self.stream
        stream.follow(self.host.known)
        tick, what = stream.tick(), f"{name} @ {line()}"
        self.num_launches += 1
        self.launches[line(1)] += 1
        self.kinds[name] += 1
        made = list(tensors_in(result))
        changed = {tensor.untyped_storage()._cdata for tensor in written}
        seen = set()
        for tensor in (*tensors, *made):
            key = tensor.untyped_storage()._cdata
            of_copy = name in COPIES and tensor.device.type == "cpu" and asynchronous
            if key in seen or not (isinstance(tensor, OnDevice) or of_copy):
                continue
            seen.add(key)
            memory = self.memory_of(tensor)
            is_new = not any(tensor is given for given in tensors)
            if is_new and name.startswith(("aten::empty", "aten::new_empty")):
                continue
            writes = key in changed or is_new
            for race in memory.use(stream, tick, what, writes=writes):
                self.races[race] += 1
        return result

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """The host uses memory of its own: copies from it and to it must be over."""
        if not self.memory or name in UNTOUCHED or getattr(func, "is_view", False):
            return
        written = {t.untyped_storage()._cdata for t in _written(func, args, kwargs)}
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:  # a backend's own copies, as its work is waited for, are not ours
            if frame.f_code.co_filename.endswith("distributed_c10d.py"):
                return
            frame = frame.f_back
        for tensor in tensors_in((args, kwargs)):
            if tensor.device.type == "cpu":
                with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no storage
                    self.host_uses(tensor, f"{name} @ {line()}", written)

    def host_uses(self, tensor: Tensor, what: str, written: set[int] = frozenset()) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self.memory:
            memory, tick = self.memory[key], self.host.tick()
            for race in memory.use(self.host, tick, what, writes=key in written):
                self.races[race] += 1

    def _check_devices(self, name: str, tensors: list[Tensor]) -> None:
        if name in COPIES or name in MIXED or "_foreach_" in name:
            return
        others = [t for t in tensors if not isinstance(t, OnDevice) and (t.ndim or "c10d" in name)]
        if others and len(others) < len(tensors):
            shapes = [tuple(tensor.shape) for tensor in others]
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({name} with {shapes} on the CPU @ {line(6)})"
            )

    def _waits(self, name: str, args: Any, kwargs: dict[str, Any], to: str) -> str | None:
        """Why the host waits for the operation; None where it does not."""
        if name in WAITING:
            return name
        if name in ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"):
            indices = [i for i in args[1] if isinstance(i, Tensor)]
            return name if any(i.dtype in (torch.bool, torch.uint8) for i in indices) else None
        if name == "aten::_to_copy":
            pairs, last = [(args[0], None, to)], kwargs.get("non_blocking")
        elif name in COPIES:
            into, source = args[:2]
            both = zip(into, source, strict=True) if isinstance(into, list) else [(into, source)]
            pairs = [(s, d, d.device.type) for d, s in both]
            last = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        else:
            return None
        for source, into, where in pairs:
            if source.device.type == where:
                continue
            on_host = source if where == "cuda" else into
            pinned = on_host is None or self.is_pinned(on_host)
            if not (last and pinned):
                which = "from" if where == "cuda" else "to"
                return f"copy {which} {'pinned' if pinned and on_host is not None else 'pageable'}"
        return None

    def _normalize(self, name: str, args: Any, tensors: list[Tensor]) -> Any:
        """CUDA's kernels of RMSNorm, by the operations that the CPU has for it."""
        given = [values_of(a) if isinstance(a, OnDevice) else a for a in args]
        x, weight = (given[1], given[4]) if name.endswith("_backward") else (given[0], given[2])
        wide, rows = x.float(), tuple(range(x.ndim - 1))
        with torch.no_grad():
            if name.endswith("_backward"):
                rstd, slope = given[3], given[0].float()
                exact = wide * rstd
                of_weight = (slope * exact).sum(rows).to(x.dtype)
                slope = slope if weight is None else slope * weight.float()
                along = (slope * exact).mean(-1, keepdim=True)
                found = (rstd * (slope - exact * along)).to(x.dtype), of_weight
                made = tuple(
                    t if wanted else None for t, wanted in zip(found, given[5], strict=True)
                )
            else:
                eps = torch.finfo(x.dtype).eps if given[3] is None else given[3]
                rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
                out = wide * rstd
                made = ((out if weight is None else out * weight).to(x.dtype), rstd)
        result = tuple(OnDevice(t) if isinstance(t, Tensor) else t for t in made)
        return self._launched(name, tensors, [], result)

    def _attend(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """CUDA's attention kernels, by the CPU's flash attention: the same tensors are kept."""
        given = [values_of(a) if isinstance(a, OnDevice) else a for a in args]
        scale, flash = kwargs.get("scale"), "_flash_" in name
        with torch.no_grad():
            if name.endswith("_backward"):
                gradient, query, key, value = given[:4]
                at, causal = (4, 11) if flash else (5, 11)
                mask = None if flash else given[4]
                found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(gradient, query, _repeat(key, query), _repeat(value, query)),
                    *(given[at], given[at + 1], 0.0, given[causal]),
                    attn_mask=mask,
                    scale=scale,
                )
                each = zip(found, (query, key, value), strict=True)
                made: tuple[Any, ...] = tuple(_sum_repeated(g, like) for g, like in each)
                made = made if flash else (*made, None)
            else:
                query, key, value = given[:3]
                mask, causal = (None, given[4]) if flash else (given[3], given[6])
                out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                    *(query, _repeat(key, query), _repeat(value, query), 0.0, causal),
                    attn_mask=mask,
                    scale=scale,
                )
                seeds = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
                lengths = (None, None, query.shape[2], key.shape[2])
                made = (out, lse, *lengths, *seeds, torch.empty(0)) if flash else (out, lse, *seeds)
        result = tuple(OnDevice(t) if isinstance(t, Tensor) else t for t in made)
        return self._launched(name, tensors, [], result)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for index, name in _writes(func):
        yield from tensors_in(args[index] if index < len(args) else kwargs.get(name))


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that the operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _repeat(key: Tensor, query: Tensor) -> Tensor:
    """One head of `key` for every head of `query`."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def _sum_repeated(gradient: Tensor, like: Tensor) -> Tensor:
    if gradient.shape == like.shape:
        return gradient
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def choose_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *_: Any, **__: Any
) -> int:
    """1: flash attention, 2: the memory-efficient one."""
    return 1 if query.dtype.itemsize == 2 and mask is None else 2


_attention = torch.nn.functional.scaled_dot_product_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, with the kernel that CUDA would choose."""
    if not isinstance(query, OnDevice):
        asked = {"scale": scale, "enable_gqa": enable_gqa}
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, **asked)
    assert dropout_p == 0.0, "the simulated device has no dropout inside attention"
    if choose_attention(query, key, value, attn_mask) == 1:
        dropout = (0.0, is_causal, False)
        return aten._scaled_dot_product_flash_attention(query, key, value, *dropout, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -1e30)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    more = (attn_mask, True, 0.0, is_causal)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, *more, scale=scale)[0]


class Mode(TorchDispatchMode):
    """Brings every operation of a thread to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if fake is not None or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what is inside comes by itself
        return current().run(func, args, kwargs or {})


_current: list[Device] = []


def current() -> Device:
    return _current[-1]


_registered = torch.library.Library("aten", "IMPL")
for _name in WITH_KERNELS:
    _registered.impl(_name, lambda *a, **k: None, "CUDA")


def _cuda(gpu: Device) -> dict[str, Any]:
    """What stands in for the names of torch.cuda."""

    def reset_peak(*_: Any) -> None:
        gpu.peak = gpu.allocated

    def register(address: int, num_bytes: int, flags: int) -> int:
        gpu.pin(address, num_bytes, num_bytes)
        return 0

    def unregister(address: int) -> int:
        gpu.pinned_bytes -= gpu.pinned.pop(address)
        return 0

    runtime = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    total = gpu.limit or 80 << 30
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: gpu.stream,
        "default_stream": lambda *_: gpu.streams[0],
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "synchronize": gpu.synchronize,
        "memory_allocated": lambda *_: gpu.allocated,
        "max_memory_allocated": lambda *_: gpu.peak,
        "max_memory_reserved": lambda *_: gpu.peak,
        "memory_reserved": lambda *_: gpu.allocated,
        "mem_get_info": lambda *_: (total - gpu.allocated, total),
        "reset_peak_memory_stats": reset_peak,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "cudart": lambda: runtime,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        **dict.fromkeys(("_lazy_init", "set_device", "empty_cache", "manual_seed_all"), _nothing),
    }


def _nothing(*_: Any) -> None: ...


def _split_group(*_: Any, **__: Any) -> None:
    """torch gives NCCL's options to gloo as well, which warns and takes its defaults instead."""
    raise RuntimeError("a group of gloo and NCCL is split")


def _move(tensors: list[Tensor], buffers: list[Tensor], device: torch.device) -> None:
    """What `fully_shard` does first; setting `.data` cannot make an `OnDevice` of a tensor."""
    for tensor in (*tensors, *buffers):
        if tensor.device.type == "cpu" and device.type == "cuda":
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            trains = tensor.requires_grad
            made = torch.nn.Parameter(moved, requires_grad=trains) if is_parameter else moved
            with mock.patch("weakref.getweakrefs", return_value=[]):  # the object stays itself
                torch.utils.swap_tensors(tensor, made)


def _sized(function: Callable[[Tensor], None], gpu: Device) -> Callable[[Tensor], None]:
    """`alloc_storage` and `free_storage` of `fully_shard`, which resize a storage in place."""

    def resized(tensor: Tensor) -> None:
        if isinstance(tensor, OnDevice) and function.__name__ == "free_storage":
            gpu.free(gpu.memory_of(tensor))
        function(tensor)
        if isinstance(tensor, OnDevice) and function.__name__ == "alloc_storage":
            memory = gpu.memory_of(tensor)
            memory.home = gpu.stream

    return resized


@contextlib.contextmanager
def simulated(*, limit: int | None = None) -> Iterator[Device]:
    """In here torch has one CUDA device, also in threads that are started here."""
    gpu = Device(limit)
    _current.append(gpu)
    Stream()  # the default one: it adds itself
    run_thread = threading.Thread.run

    def run_simulated(thread: threading.Thread) -> None:
        with Mode():
            run_thread(thread)

    def host_reads(tensor: Tensor) -> memoryview:
        """What writes a checkpoint reads memory, by no operation of torch."""
        gpu.host_uses(tensor, f"bytes_of @ {line()}")
        return bytes_of(tensor)

    accelerator = {
        "current_stream": lambda *_: gpu.stream,
        "set_device_index": _nothing,
        "is_available": lambda *_: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
    }
    torch._C._ensureCUDADeviceGuardSet()
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    with contextlib.ExitStack() as patches:
        for owner, names in (
            (torch.cuda, _cuda(gpu)),
            (torch.accelerator, accelerator),
            (torch.backends.cuda, {"is_built": lambda: True}),
            (torch._C, {"_get_accelerator": lambda *_: torch.device("cuda")}),
            (torch.nn.functional, {"scaled_dot_product_attention": attention}),
            (fsdp_init, {"_move_states_to_device": _move}),
            (shard_file, {"bytes_of": host_reads}),
            (threading.Thread, {"run": run_simulated}),
            (functional, {"_maybe_wrap_tensor": functional.wait_tensor}),  # a subclass else
            (dist, {"get_default_backend_for_device": lambda _: "gloo"}),
            (device_mesh, {"split_group": _split_group}),
            *(
                (module, {name: _sized(getattr(module, name), gpu)})
                for module in (fsdp_param, fsdp_group)
                for name in ("alloc_storage", "free_storage")
                if hasattr(module, name)
            ),
        ):
            patches.enter_context(mock.patch.multiple(owner, **names))
        patches.enter_context(  # a group of NCCL is made by splitting another
            mock.patch.object(dist.ProcessGroupGloo, "perform_nocolor_split", _nothing, create=True)
        )
        try:
            with Mode():
                yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
            _current.pop()
