"""Configuration, checkpoint loading and the whole transformer."""
