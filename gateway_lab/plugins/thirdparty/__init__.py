"""Third parties' plugins behind the bridge: built from the Go module proxy, never committed."""
