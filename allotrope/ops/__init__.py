"""Every operation but attention, one folder each: its reference, its kernels, its C, its cases."""
