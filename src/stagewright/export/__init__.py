"""Plans written as configurations of other training frameworks and cluster managers, and such configurations read."""
