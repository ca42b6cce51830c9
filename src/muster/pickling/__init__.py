"""The reasons why an object cannot be sent to another process: its path, its type, the cause, and what to write."""

from muster.pickling.culprits import Culprit, find_culprits
from muster.pickling.probe import takes
from muster.pickling.shared_parts import find_shared
from muster.pickling.travel import copied_if_plain, dumps, is_plain, named_arguments, not_rebuilt
from muster.pickling.user_call import MAKE_VEC, UserCall, called_as, current_call

__all__ = [
    "MAKE_VEC",
    "Culprit",
    "UserCall",
    "called_as",
    "copied_if_plain",
    "current_call",
    "dumps",
    "find_culprits",
    "find_shared",
    "is_plain",
    "named_arguments",
    "not_rebuilt",
    "takes",
]
