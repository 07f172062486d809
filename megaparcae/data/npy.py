"""Write a one-dimensional .npy file block by block, its length unknown until the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class NpyAppender:
    """`append` blocks, then `close`, which puts the final length into the header."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file = path.open("wb")
        self._write_header()

    def append(self, block: np.ndarray) -> None:
        """Add a block, converted to the file's dtype."""
        self._file.write(np.ascontiguousarray(block, self.dtype).data)
        self.length += len(block)

    def close(self) -> int:
        """Finish the file; returns its number of elements."""
        self._file.seek(0)
        self._write_header()
        self._file.close()
        return self.length

    def _write_header(self) -> None:
        # numpy leaves room for the first axis to grow, so the header keeps its size.
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self.dtype),
                "fortran_order": False,
                "shape": (self.length,),
            },
        )
