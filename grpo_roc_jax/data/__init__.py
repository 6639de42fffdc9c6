"""Problems from files and generated worlds, demonstrations of them, and the resumable streams of training."""
