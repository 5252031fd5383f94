"""Splitting: graphs that are cut where buckets end, for backends that need small graphs.

- ``cut``: where a graph is cut; ``forbidden_cuts``: where it must not be; ``preparation``: moves casts out of the way
- ``subgraph``: the graphs that a cut graph becomes
- ``chain``: compiles subgraphs, and runs them one after the other
- ``graph_split``: splits by size (``DDPOptimizer``) or by the wrapper's plan (``PlanSplit``)
"""
