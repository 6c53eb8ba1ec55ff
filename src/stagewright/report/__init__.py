"""Plans and runs shown to people: terminal tables, the page of pictures and the timeline traces."""
