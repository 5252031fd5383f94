"""The round protocol, model-checked."""
