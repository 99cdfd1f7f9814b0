"""The one exception type that a user is meant to read."""


class RotaquantError(Exception):
    """A request that cannot be met; the message names the thing and the way out."""
