"""From jobs to finished runs: what each is made of, what is missing, and how its process starts and ends."""
