"""Linear algebra for small or narrow matrices, where one torch call costs more than the work."""
