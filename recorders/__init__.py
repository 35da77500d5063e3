"""Where tensors are captured, and where results go."""

from recorders.recording import Recording, Subrecording

__all__ = ["Recording", "Subrecording"]
