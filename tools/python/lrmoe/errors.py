"""Errors of the package."""


class Error(RuntimeError):
    """An operation the worker refused or could not do.

    code: the gRPC status name, e.g. "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED".
    message: the worker's own words; for collective operations they name the ranks.

    After an Error that is not a WorkerLost nothing has changed in the worker and it goes on serving.
    """

    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class WorkerLost(Error):
    """The worker died, or its epoch ended because a peer or the controller did. The session cannot be used any more:
    restart the job and load the last checkpoint."""

    def __init__(self, message):
        super().__init__("UNAVAILABLE", message)


class UnsupportedModel(ValueError):
    """The experts of a model compute something that lrmoe's do not; the message names every difference."""
