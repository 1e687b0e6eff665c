"""What an op, a candidate, a key, a policy and a tolerance are; knows no device, file or timer.
Those who write candidates import from here: OPS, Op, Candidate, Gradient, Key, TensorSpec, EAGER."""

from .candidate import EAGER as EAGER
from .candidate import Candidate as Candidate
from .key import Key as Key
from .key import TensorSpec as TensorSpec
from .op import OPS as OPS
from .op import Gradient as Gradient
from .op import Op as Op
