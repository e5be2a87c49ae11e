"""Errors that running a kernel can raise."""


class Deadlock(AssertionError):
    """Error: no partition can continue, and no asynchronous operation could change that."""


class Hazard(AssertionError):
    """Error: an access that nothing orders, or an operation that the hardware does not allow."""


class NotModelled(NotImplementedError):
    """Error: the kernel uses a feature of Gluon or PTX that is not modelled."""
