"""dflash: a trainer for DFlash drafters whose every Triton launch comes out of a kernelbake bundle."""

__version__ = "0.1.0"
