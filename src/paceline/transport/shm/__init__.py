"""Collectives and messages between the ranks of one host, through memory that all of them have mapped."""
