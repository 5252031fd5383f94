"""Tests on a device whose work goes on without the host: see sim.cpp."""
