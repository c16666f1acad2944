"""Writes build/ratings.csv: eight years of ratings, in which users, films and tastes come and go.

userId, movieId, rating (0.5 to 5), timestamp (seconds since 1970), as rating sites publish theirs.
The last year is in build/last_year.csv alone.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

START, YEARS, YEAR_S = 1_388_534_400, 8, 365 * 86_400  # from 2014 on
USERS, FILMS, TASTES = 3000, 1200, 4


def main() -> None:
    """Write the files."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--ratings", type=int, default=120_000)
    words.add_argument("--seed", type=int, default=1)
    asked = words.parse_args()
    rng = np.random.default_rng(asked.seed)
    year_R = np.sort(rng.random(asked.ratings)) * YEARS
    # Users stay for about a year; films are released all the time, and seen most when new.
    joined_U = np.sort(rng.uniform(-1, YEARS, USERS))
    released_F = np.sort(rng.uniform(-3, YEARS, FILMS))
    user_R = np.searchsorted(joined_U, year_R) - 1 - rng.geometric(1 / 300, asked.ratings)
    film_R = np.searchsorted(released_F, year_R) - 1 - rng.geometric(1 / 80, asked.ratings)
    user_R, film_R = np.maximum(user_R, 0), np.maximum(film_R, 0)
    quality_F, mood_U = rng.normal(0, 0.5, FILMS), rng.normal(0, 0.4, USERS)
    film_FT = rng.normal(0, 1, (FILMS, TASTES))
    user_UT = rng.normal(0, 0.5, (USERS, TASTES))
    # Tastes turn slowly, for all together: a film of one kind gains over years, another loses.
    turn_RT = 0.7 * np.sin(year_R[:, None] * np.array([0.6, 0.9, 1.1, 1.4]) + np.arange(TASTES))
    liking_R = ((user_UT[user_R] + turn_RT) * film_FT[film_R]).sum(axis=1) * 0.6
    value_R = 3.4 + quality_F[film_R] + mood_U[user_R] + liking_R + rng.normal(0, 0.5, len(year_R))
    rating_R = np.clip(np.round(2 * value_R) / 2, 0.5, 5)
    second_R = START + (year_R * YEAR_S).astype(np.int64)
    build = Path("build")
    build.mkdir(exist_ok=True)
    old_R = year_R < YEARS - 1
    for name, part_R in (("ratings", old_R), ("last_year", ~old_R)):
        with (build / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["userId", "movieId", "rating", "timestamp"])
            columns = (user_R, film_R, rating_R, second_R)
            rows.writerows(zip(*(column[part_R].tolist() for column in columns), strict=True))
    print(f"{old_R.sum():,} ratings of seven years, {(~old_R).sum():,} of the last, in {build}/")


main()
