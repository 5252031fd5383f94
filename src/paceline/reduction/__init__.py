"""How gradients become averages: from the hook that autograd calls to the averaged ``.grad``."""
