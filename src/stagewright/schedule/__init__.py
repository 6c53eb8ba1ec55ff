"""Actions, programs and placements, and one pure function per schedule family."""
