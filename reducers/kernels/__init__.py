"""How a tensor is reduced fast and exactly."""
