"""Reports on plans and runs: terminal tables, HTML pages, pictures and timeline traces."""
