"""What a run can find."""


class Deadlock(AssertionError):
    """No partition can go on, and nothing is under way that could change that."""


class Hazard(AssertionError):
    """Something is done that nothing orders, or that the hardware does not allow."""


class NotModelled(NotImplementedError):
    """The kernel uses something of Gluon, or of PTX, that this model does not have."""
