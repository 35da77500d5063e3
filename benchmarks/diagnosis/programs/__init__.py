"""The programs: one file for each kind of data. Importing this package registers all of them."""

from benchmarks.diagnosis.programs import generative, held_out_sequences, held_out_vectors, images, sequences, vectors

__all__ = ["generative", "held_out_sequences", "held_out_vectors", "images", "sequences", "vectors"]
