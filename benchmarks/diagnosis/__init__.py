"""How often a diagnosis of trainings is right: healthy trainings, the same with one planted fault each, and what is found."""
