"""Problems: files and generated worlds, demonstrations of them, and the resumable streams that training reads."""
