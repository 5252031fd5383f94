"""What there is to reduce: the parameters, the plan of their buckets, and the memory that their gradients live in."""
