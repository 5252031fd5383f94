"""Paceline in the frameworks that people train with. Each module needs its framework, and is imported only on use."""
