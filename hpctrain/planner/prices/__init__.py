"""Prices of a pass: by data sheet, by measured products, by profile."""
