"""``python -m kernelbake``, also under ``torchrun -m``."""

from kernelbake.cli import main

if __name__ == "__main__":
    main()
