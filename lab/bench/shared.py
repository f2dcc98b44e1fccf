"""Tensors that two processes see: of the GPU through CUDA's interprocess handles, of the host through files in memory.

The harness owns them. What an arm's process is given is a `Handle` for each tensor: plain data, nothing is unpickled.
Files have no name but that of the harness's descriptor, so that nothing is left of them when it is killed (Linux).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import msgspec


class Handle(msgspec.Struct, frozen=True):
    """One tensor. storage: what finds its memory: a file's name, or the eight parts of CUDA's handle; see torch."""

    storage: str | tuple[int, bytes, int, int, bytes, int, bytes, bool]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Shelf:
    """The harness's side: makes tensors that can be handed out. Files of the host's tensors go with `clear`."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}  # descriptors by the address that they are mapped at

    def tensor(self, given: Any) -> Any:
        """`given` itself on a GPU; on the host a copy in a file that another process can map. Views keep their storage.

        Two tensors of one storage become two copies on the host.
        """
        import torch

        if given.is_cuda:
            return given
        file = os.memfd_create("killgate")
        os.truncate(file, bytes_ := max(given.untyped_storage().nbytes(), 1))
        storage = _mapped(_path(file), bytes_)
        storage.copy_(given.untyped_storage())
        if (gone := self.files.pop(storage.data_ptr(), None)) is not None:  # of a tensor that was dropped
            os.close(gone)
        self.files[storage.data_ptr()] = file
        made = torch.empty(0, dtype=given.dtype)
        return made.set_(storage, given.storage_offset(), given.shape, given.stride())

    def handle(self, tensor: Any) -> Handle:
        """What another process opens; raises KeyError for a host's tensor that is not of `tensor`."""
        storage = tensor.untyped_storage()
        found = storage._share_cuda_() if tensor.is_cuda else _path(self.files[storage.data_ptr()])
        kind = str(tensor.dtype).removeprefix("torch.")
        return Handle(found, kind, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def clear(self, kept: Iterable[Any] = ()) -> None:
        """Forget every file but those of `kept`; memory that somebody still maps stays his."""
        places = {tensor.untyped_storage().data_ptr() for tensor in kept}
        for place in [place for place in self.files if place not in places]:
            os.close(self.files.pop(place))


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def _mapped(path: str, bytes_: int) -> Any:
    import torch

    return torch.from_file(path, shared=True, size=bytes_, dtype=torch.uint8).untyped_storage()


def opened(handle: Handle) -> Any:
    """The arm's side: the tensor of a handle, over the harness's memory."""
    import torch

    if isinstance(handle.storage, str):
        storage = _mapped(handle.storage, os.stat(handle.storage).st_size)
        made = torch.empty(0, dtype=getattr(torch, handle.dtype))
    else:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*handle.storage)
        made = torch.empty(0, dtype=getattr(torch, handle.dtype), device="cuda")
    return made.set_(storage, handle.offset, handle.shape, handle.strides)
