"""kernelbake: plan, compile, measure and freeze every Triton kernel of a training run."""

__version__ = "0.1.0"
