"""An environment with a hidden state: a number from 0 to 6 has to be guessed in three turns.

    python examples/guess.py > runs/tiny_1/guess_sft.jsonl

writes warm-start examples in which half of the guesses go where the last answer points (examples/guess.sh).
"""

import json
import random


class Guess:
    """A guess is a digit. After a wrong one the environment says + if the number is larger, - if it is smaller."""

    def reset(self, row):
        """Draw a number, which the policy does not see."""
        self.number = random.randrange(7)
        self.guesses = 0
        return "="

    def step(self, response):
        """Compare a guess."""
        self.guesses += 1
        right = response.text == str(self.number)
        if right or self.guesses == 3 or len(response.text) != 1 or response.text not in "0123456":
            return [], right, True
        return "+" if self.number > int(response.text) else "-", None, False


if __name__ == "__main__":
    draw = random.Random(1)
    for _ in range(4000):
        number = draw.randrange(7)
        context = "="
        low, high = 0, 6
        for _turn in range(draw.randint(1, 3)):
            guess = draw.randint(low, high) if draw.random() < 0.5 and low <= high else draw.randrange(7)
            said = f"</think>{guess}<eos>"
            example = {"prompt": context, "completion": said}
            hint = "+" if number > guess else "-"
            low, high = (guess + 1, 6) if hint == "+" else (0, guess - 1)
            context += f"<think>{said}{hint}"
        print(json.dumps(example))
