"""What an op, a candidate, a key, a policy and a tolerance are; knows no device, file or timer.
Those who write candidates import from here: OPS, Op, Candidate, Gradient, Key, TensorSpec, EAGER."""

from .candidate import EAGER, Candidate
from .key import Key, TensorSpec
from .op import OPS, Gradient, Op

__all__ = ["EAGER", "OPS", "Candidate", "Gradient", "Key", "Op", "TensorSpec"]
