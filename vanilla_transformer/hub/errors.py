"""What a user can do about the errors of the Hub's client, and whether a token may push at all."""

from typing import Any

from huggingface_hub import HfApi, errors, get_token

from .files import join_lines

# httpx's own base class, under whatever name the client imports it.
_HTTP_ERROR: type[Exception] = errors.HfHubHTTPError.__mro__[1]
# What the client raises: its own, httpx's, and those that the uploader of large files takes for all of its failures.
HUB_ERRORS = (_HTTP_ERROR, OSError, ValueError, RuntimeError)
_AGAIN = "Nothing changed there; the same command again completes the push, and sends nothing twice that arrived."
_LOG_IN = "Log in with `hf auth login`, or set the variable HF_TOKEN."


class PushError(RuntimeError):
    """The Hub, or the way to it, did not let a push happen; the message says what to do about it."""


def is_network_error(error: Exception) -> bool:
    """Whether nobody answered, be it that the machine is not connected or that the Hub is not there."""
    answered = isinstance(error, errors.HfHubHTTPError)
    return isinstance(error, _HTTP_ERROR | ConnectionError | TimeoutError) and not answered


def explain_error(error: Exception, where: str, *, endpoint: str, token: str | None, is_new: bool = False) -> PushError:
    """Says what a user can do about an error of the client.

    Args:
        error: What it raised.
        where: The repository.
        endpoint: The Hub's address.
        token: What was used, which is not repeated.
        is_new: Whether there is no such repository.

    Returns:
        An error to raise instead.
    """
    message = join_lines(error)
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # which file could not be sent matters less than why
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        text = "The Hub is not asked, since the variable HF_HUB_OFFLINE is set."
    elif is_network_error(error):
        text = f"{endpoint} cannot be reached, or does not answer as it should ({message}). {_AGAIN}"
    elif isinstance(error, errors.LocalTokenNotFoundError) or (status == 401 and not token):
        text = f"Pushing to {where} needs a token of the Hub. {_LOG_IN}"
    elif status is not None:
        text = _explain_status(status, where, is_new) or f"The Hub, or its client, refuses: {message}"
    else:
        text = f"The Hub, or its client, refuses: {message}"
    return PushError(text.replace(token, "<token>") if token else text)


def _explain_status(status: int, where: str, is_new: bool) -> str | None:
    if status == 401:
        return f"The Hub does not accept the token: it is mistyped, has expired or was revoked. {_LOG_IN}"
    if status == 403 and is_new:
        return f"The token may not make the repository {where}: it is read-only, or the namespace is somebody else's."
    if status == 403:
        return f"The token may not write to {where}. Use one that may, or propose the change with --create_pr."
    if status == 404:
        return f"There is no repository {where}, or the token may not see it."
    if status in (409, 412):
        return f"{where} has changed on the Hub meanwhile. Nothing was pushed; the same command again looks anew."
    if status >= 500:
        return f"The Hub failed with status {status}. {_AGAIN}"
    return None


def check_token(token: str | None = None) -> str:
    """Makes sure that a token is valid and not read-only, before the work that is to be pushed is done.

    Whether it may write to some repository is known only when it does: tokens may have finer rights.

    Args:
        token: The token. Default: the one of `hf auth login` or of the variable HF_TOKEN.

    Returns:
        The user's name.

    Raises:
        PushError: If there is no token, the Hub does not accept it, it is read-only, or the Hub cannot be asked.
    """
    token = token or get_token()
    api = HfApi(token=token or False)
    try:
        if not token:
            raise errors.LocalTokenNotFoundError
        user: dict[str, Any] = api.whoami()
    except HUB_ERRORS as error:
        raise explain_error(error, "the Hub", endpoint=api.endpoint, token=token) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PushError(
            f"The token of {user['name']} is read-only: make one that may write, in your settings on the Hub."
        )
    return str(user["name"])
