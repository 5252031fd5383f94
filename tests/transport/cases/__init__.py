"""The cases of the conformance suite, one module a subject."""
