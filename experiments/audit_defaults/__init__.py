"""Which damping is the safe default: for label audits (`run`) and for strange inputs (`strangers`)."""
