"""Drop-in classes for other libraries' layers."""
