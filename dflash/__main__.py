"""``python -m dflash``, also under ``torchrun -m``."""

from dflash.cli import main

if __name__ == "__main__":
    main()
