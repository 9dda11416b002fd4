"""Services for a running command: directory, log, report, interrupts, compilation cache."""
