"""What is wrong with a request, in the form that OpenAI's clients read."""

from collections.abc import Mapping
from typing import Any


class RequestRefused(Exception):
    """A request that is answered with an error.

    Args:
        message: What was got, the constraint, and the fix.
        param: Field of the body that it is about.
        code: Short name for programs.
        status: Of HTTP.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def field_of(body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of a request, of one of these types; `default` where it is absent or null.

    Raises:
        RequestRefused: It is of another type.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise RequestRefused(f"{name} is {type(value).__name__}; must be {names}", name)
    return value
