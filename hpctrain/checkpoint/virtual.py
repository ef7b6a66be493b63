"""The index for h5py: every tensor whole, as an HDF5 virtual dataset over the parts."""

import io
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from hpctrain.checkpoint.format import INDEX, Tensor
from hpctrain.config.errors import DamagedCheckpointError


def make_index(tensors: Sequence[Tensor], sources: Sequence[tuple[str, str, int]], rectangles: np.ndarray) -> bytes:
    """Return the bytes of an index file.

    `sources` are the streams: file, dataset, number of elements. `rectangles` are sorted by tensor.
    """
    parents = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    parents.set_create_intermediate_group(True)
    bounds = np.searchsorted(rectangles["tensor"], np.arange(len(tensors) + 1))
    flat = [(file.encode(), name.encode(), h5py.h5s.create_simple((count,))) for file, name, count in sources]
    with h5py.File("index", "w", driver="core", backing_store=False, libver="latest") as index:
        for number, tensor in enumerate(tensors):
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_obj_track_times(False)
            properties.set_fill_value(np.array(np.nan, "<f4"))
            space = h5py.h5s.create_simple(tensor.shape)
            for rectangle in rectangles[bounds[number] : bounds[number + 1]].tolist():
                _, stream, *corners, start = rectangle
                corner, counts = _rectangle(len(tensor.shape), *corners)
                file, name, source = flat[stream]
                space.select_hyperslab(corner, counts)
                source.select_hyperslab((start,), (int(np.prod(counts)),))
                properties.set_virtual(space, file, name, source)
            space.select_all()
            h5py.h5d.create(index.id, tensor.name.encode(), h5py.h5t.IEEE_F32LE, space, properties, lcpl=parents)
        index.flush()
        return index.id.get_file_image()


def _rectangle(num_dims: int, rows: Sequence[int], columns: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    corner, counts = (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0])
    return corner[:num_dims], counts[:num_dims]


def check_index(
    folder: Path, tensors: Sequence[Tensor], sources: Sequence[tuple[str, str, int]], rectangles: np.ndarray
) -> None:
    """Refuse an index, whose bytes are known to be whole, that shows something else than the rectangles.

    Raises DamagedCheckpointError.
    """
    path = folder / INDEX
    bounds = np.searchsorted(rectangles["tensor"], np.arange(len(tensors) + 1))
    try:
        with h5py.File(io.BytesIO(path.read_bytes()), "r") as index:
            for number, tensor in enumerate(tensors):
                dataset = index.get(tensor.name)
                if not isinstance(dataset, h5py.Dataset) or dataset.shape != tensor.shape or dataset.dtype != "<f4":
                    raise DamagedCheckpointError(f"{path}: does not show {tensor.name} as it is in the checkpoint")
                expected = set()
                for _, stream, *corners, start in rectangles[bounds[number] : bounds[number + 1]].tolist():
                    corner, counts = _rectangle(len(tensor.shape), *corners)
                    size = int(np.prod(counts))
                    expected.add((sources[stream][:2], corner, counts, start, size))
                if _mappings(dataset.id.get_create_plist()) != expected:
                    raise DamagedCheckpointError(f"{path}: maps {tensor.name} to other places than {folder} has it at")
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error}") from None


def _mappings(properties) -> set:
    result = set()
    for number in range(properties.get_virtual_count()):
        low, high = properties.get_virtual_vspace(number).get_select_bounds()
        start, stop = properties.get_virtual_srcspace(number).get_select_bounds()
        counts = tuple(int(b - a + 1) for a, b in zip(low, high, strict=True))
        file, name = properties.get_virtual_filename(number), properties.get_virtual_dsetname(number)
        corner = tuple(map(int, low))
        result.add(((file, name), corner, counts, int(start[0]), int(stop[0] - start[0] + 1)))
    return result
