"""Drop-in replacements for other libraries' layers, and conversion from and to them."""
