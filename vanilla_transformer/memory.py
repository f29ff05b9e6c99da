"""What the C library does with the memory that tensors leave."""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's names for them, in glibc's malloc.h
_AS_MUCH_AS_IT_TAKES = 2**31 - 1
_NEARLY_ALL, _MOST_OF_OLD_VERSIONS = 2**30, 2**25

_is_kept = False


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for its next tensors: on a CPU much time is saved.

    Logits and the like come and go at every step. glibc returns them to the system, which then has to lay out their
    pages anew, 4 KB at a time. Other C libraries are left alone, and so are the environment's own wishes
    (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`). Returns whether there was something to do.
    """
    if platform.libc_ver()[0] != "glibc" or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    global _is_kept
    mallopt = ctypes.CDLL(None).mallopt
    kept = mallopt(_MMAP_THRESHOLD, _NEARLY_ALL) or mallopt(_MMAP_THRESHOLD, _MOST_OF_OLD_VERSIONS)
    _is_kept = bool(kept and mallopt(_TRIM_THRESHOLD, _AS_MUCH_AS_IT_TAKES))
    return _is_kept


def release_kept_memory() -> None:
    """Gives back what is free now, if this process keeps it: to be called now and then in long work.

    Tensors of ever other sizes leave gaps, into which the next ones do not fit. In hours they come to gigabytes.
    """
    if _is_kept:
        ctypes.CDLL(None).malloc_trim(0)
