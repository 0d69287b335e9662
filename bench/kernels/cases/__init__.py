"""What `bench/kernels.py` measures: one file per family, each with `cases() -> list[KernelCase]`; see `case.py`."""
