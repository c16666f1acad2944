"""What a trainer gives away: snapshots, and versions on the bus."""
