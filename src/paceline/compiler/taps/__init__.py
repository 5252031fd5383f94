"""Taps: graphs whose backward reports gradients while it runs, and what is done around such a graph.

- ``tap``: the parameters that a graph reports together, and where their gradients go
- ``parameter_binding``: which parameters a call of the graph is about
- ``ops``: the operators that stand in graphs
- ``tapped_graph``: puts taps into a graph that Dynamo has captured
- ``graph_run``: is called instead of the compiled graph, and does the wrapper's part before and after it
"""
